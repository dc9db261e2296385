"""Figures by hand: medians with their ranges, and lines through times."""

from __future__ import annotations

import pytest

from samestep.bench.statistics import Link, fit_link, spread_of


def test_a_median_has_the_range_of_its_rank() -> None:
    """Of nine rounds: three places (0.98 * sqrt(9)) to each side of the fifth."""
    found = spread_of([9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0])
    assert (found.median, found.low, found.high) == (5.0, 2.0, 8.0)


def test_with_few_rounds_the_range_is_all_of_them() -> None:
    found = spread_of([3.0, 1.0, 2.0])
    assert (found.median, found.low, found.high) == (2.0, 1.0, 3.0)


def test_an_outlier_is_kept_and_moves_no_median() -> None:
    found = spread_of([1.0, 1.1, 1.2, 1.3, 50.0])
    assert (found.median, found.high) == (1.2, 50.0)


def test_a_line_has_the_latency_and_bandwidth_that_made_it() -> None:
    made = Link(latency=50e-6, bandwidth=1e9)
    sizes = [1024.0 * 4**power for power in range(8)]
    found = fit_link(sizes, [made.seconds(size) for size in sizes])
    assert found is not None
    assert found.latency == pytest.approx(50e-6, rel=1e-6)
    assert found.bandwidth == pytest.approx(1e9, rel=1e-6)


def test_a_large_message_does_not_decide_the_latency() -> None:
    """Its time is off by a tenth, a thousand times the latency: in seconds the fit would be lost."""
    made = Link(latency=50e-6, bandwidth=1e9)
    sizes = [1024.0 * 4**power for power in range(9)]
    seconds = [made.seconds(size) for size in sizes]
    seconds[-1] *= 1.1
    found = fit_link(sizes, seconds)
    assert found is not None
    assert found.latency == pytest.approx(50e-6, rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "seconds"), [([1024.0], [1e-3]), ([1e3, 1e6], [2e-3, 1e-3]), ([1e3] * 2, [1e-3, 2e-3])]
)
def test_times_that_do_not_grow_have_no_line(sizes: list[float], seconds: list[float]) -> None:
    assert fit_link(sizes, seconds) is None
