"""Ratios of rounds, by hand and by counting orders."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from samestep.bench.statistics import _left_out, _orders, ratio_confidence_interval


@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 3), (4, 3), (4, 4)])
def test_orders_are_counted_as_if_all_were_written_down(first: int, second: int) -> None:
    counted: Counter[int] = Counter()
    for places in itertools.combinations(range(first + second), first):
        others = [place for place in range(first + second) if place not in places]
        counted[sum(other < place for place in places for other in others)] += 1
    assert _orders(first, second) == [counted[count] for count in range(first * second + 1)]


@pytest.mark.parametrize(
    ("first", "second", "outside"),
    [
        (3, 3, None),  # 1 of 20 orders has none below: 5 % at one end, and 2.5 % may be
        (4, 4, 0),  # 1 of 70 has 0, 1 has 1: 1.4 %, then 2.9 %
        (5, 5, 2),  # 252 orders: 1, 1, 2 make 1.6 %, with 3 more 2.8 %
        (7, 7, 8),  # the table of Mann and Whitney has 8 as critical value
    ],
)
def test_ends_are_those_of_the_rank_test(first: int, second: int, outside: int | None) -> None:
    assert _left_out(first, second) == outside


def test_a_ratio_has_the_median_and_the_range_of_all_pairs() -> None:
    """Four against four: all 16 ratios are the range."""
    found = ratio_confidence_interval([2.0, 2.2, 2.1, 2.0], [1.0, 1.1, 1.0, 1.0])
    assert found is not None
    assert (found.low, found.high) == pytest.approx((2.0 / 1.1, 2.2))
    assert found.median == pytest.approx(2.0)


def test_too_few_rounds_have_no_range() -> None:
    assert ratio_confidence_interval([2.0] * 3, [1.0] * 3) is None
