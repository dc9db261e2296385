"""The ratio of two sets of rounds, by their ranks and not by an assumed distribution."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from samestep.bench.statistics import Spread

_CHANCE = 0.05
"""How often the true ratio may lie outside of the range."""


def ratio_confidence_interval(after: Sequence[float], before: Sequence[float]) -> Spread | None:
    """Return how many times larger, with its 95 % range.

    All ratios of a round after to a round before; their median is the estimate of Hodges and Lehmann, and the
    range is that of the rank test of Mann and Whitney: it excludes 1 if and only if that test finds a difference.

    Returns:
        None if there are too few rounds for any such range: three and three, for example.
    """
    ratios = sorted(late / early for late in after for early in before)
    outside = _left_out(len(after), len(before))
    if outside is None:
        return None
    return Spread(statistics.median(ratios), ratios[outside], ratios[-1 - outside])


def _left_out(first: int, second: int) -> int | None:
    """Return how many of the ratios lie beyond each end of the range; None if even all are too few."""
    ways, total, seen = _orders(first, second), math.comb(first + second, first), 0
    for count, number in enumerate(ways):
        seen += number
        if seen > _CHANCE / 2 * total:
            return count - 1 if count else None
    return None


def _orders(first: int, second: int) -> list[int]:
    """In how many orders of all rounds there are 0, 1, 2... pairs with the later one smaller.

    Row by row: the largest of all rounds is of the first set, and is above all of the second, or is not.
    """
    table = {(0, few): [1] for few in range(second + 1)} | {(few, 0): [1] for few in range(first + 1)}
    for many in range(1, first + 1):
        for few in range(1, second + 1):
            above, below = table[many - 1, few], table[many, few - 1]
            size = many * few + 1
            found = [0] * size
            for place, number in enumerate(above):
                found[place + few] += number
            for place, number in enumerate(below):
                found[place] += number
            table[many, few] = found
    return table[first, second]
