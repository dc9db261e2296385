"""Losses, counts and flags that travel in a gradient bucket arrive to the bit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from samestep.reduce.bucket_stats import BucketStats, slots
from samestep.reduce.stats import EMPTY, LaneStats, LocalStats, RankFlags

PLACES = pytest.mark.parametrize("on_host", [True, False])
"""The second is for buckets on a GPU; its kernels run on CPUs too."""

anything = st.floats(allow_nan=False, allow_infinity=False, width=64).filter(lambda x: x == 0 or 1e-20 < abs(x) < 1e30)


def sent(
    on_host: bool, lanes: Sequence[Sequence[LaneStats]], flags: Sequence[RankFlags], dtype: torch.dtype = torch.float32
) -> tuple[LocalStats, Tensor]:
    """What arrives of stats that every rank sends, and the bucket."""
    count, at = sum(map(len, lanes)), 0
    buckets, found = [], []
    for rank, mine in enumerate(lanes):
        bucket = torch.full((slots(count, len(lanes)),), math.nan, dtype=dtype)
        bucket_stats = BucketStats(bucket, range(at, at + len(mine)), count, rank, on_host)
        found.append(bucket_stats.attach(mine, flags[rank]))
        bucket_stats.write()
        buckets.append(bucket)
        at += len(mine)
    buckets[-1].copy_(sum(buckets))
    bucket_stats.arrive()
    return found[-1], buckets[-1]


def alone(on_host: bool, loss: float, count: float, dtype: torch.dtype) -> list[float]:
    found, _ = sent(on_host, [[LaneStats(loss, count)]], [RankFlags()], dtype)
    return [float(value) for value in found.values()]


@PLACES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(loss=anything, count=anything)
def test_doubles_survive_to_the_bit(on_host: bool, dtype: torch.dtype, loss: float, count: float) -> None:
    assert alone(on_host, loss, count, dtype) == [loss, count]


@PLACES
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_survive_too(on_host: bool, number: float) -> None:
    first, second = alone(on_host, number, 1.0, torch.float32)
    assert first == number or (math.isnan(first) and math.isnan(number))
    assert second == 1.0


@PLACES
def test_a_loss_beyond_the_buckets_type_is_infinite(on_host: bool) -> None:
    assert alone(on_host, 1e300, 1.0, torch.float32) == [math.inf, 1.0]


@PLACES
def test_every_ranks_lanes_and_flags_arrive(on_host: bool) -> None:
    odd = 0.1 + 0.2
    found, bucket = sent(
        on_host,
        [[LaneStats(torch.tensor(odd, dtype=torch.float64), 3.0)], [EMPTY, LaneStats(1e-3, 2.0**40 + 1)]],
        [RankFlags(0.0, 1.5), RankFlags(271.0, 0.25)],
    )
    bucket.zero_()  # the next step needs the memory
    assert found.values() == [odd, 3.0, 0.0, 0.0, 1e-3, 2.0**40 + 1]
    assert found.count() == 2.0**40 + 4
    assert found.losses() == [odd, 0.0, 1e-3]
    assert found.flags()() == [RankFlags(0.0, 1.5), RankFlags(271.0, 0.25)]
    assert not found.no_requests, "another rank may request something"
    assert not found.flags_wait


@PLACES
def test_flags_come_beside_lanes_that_a_replay_has_seated(on_host: bool) -> None:
    bucket = torch.full((slots(1, 1),), math.nan)
    bucket_stats = BucketStats(bucket, range(1), 1, 0, on_host)
    bucket_stats.write_lanes([LaneStats(6.0, 2.0)])
    found = bucket_stats.write_flags(RankFlags(3.0, 0.5))
    bucket_stats.write()  # nothing was to be taken along: what is seated stays
    bucket_stats.arrive()
    assert found.values() == [6.0, 2.0]
    assert found.flags()() == [RankFlags(3.0, 0.5)]
