"""Losses, counts and flags of a step: kept unread, and carried to the bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from samestep.distributed.health.activity import EXCHANGE, Activity
from samestep.reduce.stats import (
    EMPTY,
    NO_FLAGS,
    GatheredStats,
    LaneStats,
    LocalStats,
    RankFlags,
    begin_reading,
    inverse,
    read_numbers,
    stack_stats,
)

CPU = torch.device("cpu")
LANES = [LaneStats(torch.tensor(6.0), 2.0), EMPTY, LaneStats(3.0, torch.tensor(4))]


# -- in one process -------------------------------------------------------------------------------


def test_counts_of_all_lanes_add_up_whatever_they_are() -> None:
    assert float(LocalStats(LANES, NO_FLAGS).count()) == 6.0
    assert LocalStats([], NO_FLAGS).count() == 0.0


def test_counts_are_added_in_double_precision() -> None:
    lanes = [LaneStats(0.0, torch.tensor(2.0**24)), LaneStats(0.0, torch.tensor(1.0))]
    assert float(LocalStats(lanes, NO_FLAGS).count()) == 2.0**24 + 1


def test_values_are_in_lane_order_and_empty_lanes_keep_their_place() -> None:
    values = LocalStats(LANES, NO_FLAGS).values()
    assert [float(value) for value in values] == [6.0, 2.0, 0.0, 0.0, 3.0, 4.0]
    assert [float(loss) for loss in LocalStats(LANES, NO_FLAGS).losses()] == [6.0, 0.0, 3.0]


def test_one_process_knows_at_once_that_nothing_is_requested() -> None:
    quiet, asking = LocalStats(LANES, NO_FLAGS), LocalStats(LANES, RankFlags(256.0))
    assert quiet.no_requests
    assert not asking.no_requests
    assert not asking.flags_wait
    assert asking.flags()() == [RankFlags(256.0)]


# -- by a collective ------------------------------------------------------------------------------


class Work:
    """A collective that brings its numbers only when it is waited for."""

    def __init__(self, everyone: torch.Tensor, arrives: list[float], activity: Activity) -> None:
        self.waits: list[str] = []
        self._everyone, self._arrives, self._activity = everyone, arrives, activity

    def wait(self) -> None:
        self.waits.append(self._activity.phase)
        self._everyone.copy_(torch.tensor(self._arrives, dtype=torch.float64))


def gathered() -> tuple[GatheredStats, Work]:
    """Two lanes of rank 0 and one of rank 1, which is padded; then each rank's flags."""
    activity = Activity()
    everyone = torch.zeros(12, dtype=torch.float64)
    arrives = [1.0, 2.0, 3.0, 4.0, 0.0, 0.5, 5.0, 6.0, 0.0, 0.0, 256.0, 1.5]
    work = Work(everyone, arrives, activity)
    mine = torch.zeros(6, dtype=torch.float64)
    return GatheredStats(everyone, mine, work, [range(2), range(2, 3)], activity), work  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        (lambda stats: stats.values(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        (lambda stats: stats.count(), 12.0),
        (lambda stats: sum(stats.losses()), 9.0),
        (lambda stats: stats.flags()(), [RankFlags(0.0, 0.5), RankFlags(256.0, 1.5)]),
    ],
)
def test_gathered_stats_are_waited_for_when_they_are_looked_at(look: Any, expected: Any) -> None:
    stats, work = gathered()
    assert work.waits == []
    assert look(stats) == expected
    assert look(stats) == expected
    assert work.waits == [EXCHANGE], "once, as an exchange"


# -- numbers --------------------------------------------------------------------------------------


def test_pairs_become_rows_of_doubles() -> None:
    rows = stack_stats([*LANES, RankFlags(2.0, 0.5)], CPU)
    assert rows.dtype == torch.float64
    assert rows.tolist() == [[6.0, 2.0], [0.0, 0.0], [3.0, 4.0], [2.0, 0.5]]


@pytest.mark.parametrize(
    ("total", "expected"), [(4, 0.25), (0, 0.0), (torch.tensor(8.0), 0.125), (torch.tensor(0), 0.0)]
)
def test_the_inverse_of_nothing_is_nothing(total: Any, expected: float) -> None:
    assert inverse(total, CPU) == expected


def test_values_of_any_type_are_read_in_their_order() -> None:
    values = [torch.tensor(1), 2.5, None, torch.tensor(3.5), torch.tensor(True), 4]
    found = read_numbers(values)
    assert math.isnan(found[2])
    assert [found[0], found[1], *found[3:]] == [1.0, 2.5, 3.5, 1.0, 4.0]
    assert read_numbers([]) == []


def test_reading_from_the_host_waits_for_nothing() -> None:
    read, would_wait = begin_reading([torch.tensor(1.0), 2.0])
    assert not would_wait
    assert read() == [1.0, 2.0]
