"""What grows with the steps is a leak; what moves, fills up or creeps is none."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from samestep.bench.leak import LEAST_RESIDENT_GROWTH, growth_of, theil_sen, windowed_minima
from samestep.bench.memory import in_use

MB = 1 << 20


def test_windows_leave_out_the_warm_up_and_keep_the_least() -> None:
    """Of 80 steps the first 20 are left out; 20 windows of three steps are left."""
    held = [1000 if step % 3 else step for step in range(80)]
    at, least = windowed_minima(held)
    assert at[:2] == [21.0, 24.0]
    assert least[:3] == [21.0, 24.0, 27.0]
    assert len(at) == 20


def test_a_slope_is_the_median_of_all_pairs_with_sens_range() -> None:
    """Of eight points on a line of 3, all 28 slopes are 3; one point off moves no median."""
    found = theil_sen(range(8), [3.0 * x for x in range(8)])
    assert (found.median, found.low, found.high) == (3.0, 3.0, 3.0)
    moved = theil_sen(range(8), [*(3.0 * x for x in range(7)), 100.0])
    assert moved.median == 3.0
    # sqrt(8 * 7 * 21 / 18) * 1.96 = 15.84: the 7th and the 22nd of 28 slopes.
    slopes = sorted([3.0] * 21 + [(100 - 3 * x) / (7 - x) for x in range(7)])
    assert (moved.low, moved.high) == (slopes[6], slopes[22])


def test_too_few_points_prove_nothing() -> None:
    found = theil_sen([0, 1, 2], [0.0, 1.0, 2.0])
    assert (found.median, found.low) == (1.0, float("-inf"))


@pytest.mark.parametrize("steps", [200, 2000])
def test_a_planted_leak_is_found_under_noise(steps: int) -> None:
    draw = random.Random(0)
    held = [100 * MB + 65536 * step + draw.randrange(2 * MB) for step in range(steps)]
    found = growth_of(held)
    assert found.leaks
    assert found.slope.low <= 65536 <= found.slope.high
    assert found.slope.median == pytest.approx(65536, rel=0.05)


@pytest.mark.parametrize(
    "held",
    [
        [100 * MB] * 200,
        [100 * MB + (step % 7) * MB for step in range(200)],
        [100 * MB + 20 * MB * min(step, 60) // 60 for step in range(200)],  # fills up once
        [100 * MB + 300 * step for step in range(2000)],  # creeps: 0.4 MB in all
        [100 * MB + 10_000 * step + (step % 5) * MB for step in range(200)],  # less than it moves
    ],
)
def test_memory_that_only_moves_is_not_accused(held: list[int]) -> None:
    assert not growth_of(held).leaks


def test_resident_memory_may_grow_by_what_allocators_keep() -> None:
    held = [100 * MB + 5_000 * step for step in range(2000)]
    assert growth_of(held).leaks
    assert not growth_of(held, LEAST_RESIDENT_GROWTH).leaks


@pytest.mark.skipif(in_use() is None, reason="only glibc 2.33 or later tells what is in use")
@pytest.mark.parametrize("make", [lambda: bytes(8 * MB), lambda: [object() for _ in range(1 << 17)]])
def test_what_is_in_use_follows_what_is_kept(make: Callable[[], object]) -> None:
    before = in_use() or 0
    kept = make()
    while_kept = in_use() or 0
    del kept
    after = in_use() or 0
    assert while_kept - before >= 0.9 * 8 * MB
    assert after - before <= 0.5 * MB
