"""Ratios of rounds, by hand."""

from __future__ import annotations

import pytest

from samestep.bench.statistics import ratio_confidence_interval


@pytest.mark.parametrize(
    ("rounds", "outside"),
    [
        (3, 0),  # 1 of 20 orders has none below: 5 % at one end, and 2.5 % may be
        (4, 0),  # 1 of 70 has 0, 1 has 1: 1.4 %, then 2.9 %
        (5, 2),  # 252 orders: 1, 1, 2 make 1.6 %, with 3 more 2.8 %
        (7, 8),  # the table of Mann and Whitney has 8 as critical value
    ],
)
def test_ends_are_those_of_the_rank_test(rounds: int, outside: int) -> None:
    after = [2.0 ** (rounds * number) for number in range(rounds)]
    before = [2.0**-number for number in range(rounds)]
    ratios = sorted(late / early for late in after for early in before)
    found = ratio_confidence_interval(after, before)
    assert (found.low, found.high) == (ratios[outside], ratios[-1 - outside])


def test_a_ratio_has_the_median_and_the_range_of_all_pairs() -> None:
    """Four against four: all 16 ratios are the range."""
    found = ratio_confidence_interval([2.0, 2.2, 2.1, 2.0], [1.0, 1.1, 1.0, 1.0])
    assert (found.low, found.high) == pytest.approx((2.0 / 1.1, 2.2))
    assert found.median == pytest.approx(2.0)
