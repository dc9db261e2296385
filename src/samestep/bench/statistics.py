"""Figures with their spread, lines through them, and ratios by ranks, which assume no distribution. No torch here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WORTH = 1.1
"""A choice that is so many times as fast is recommended in place of a simpler one."""


@dataclass(frozen=True)
class Spread:
    """A median, and where the true one lies in about 95 of 100 measurements."""

    median: float
    low: float
    high: float


def spread_of(values: Sequence[float]) -> Spread:
    """Return the spread of the rounds of a measurement; outliers are kept, since a median bears them."""
    ordered = sorted(values)
    return Spread(statistics.median(ordered), *range_of_median(ordered))


def range_of_median(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the values between which the median lies, with about 95 % confidence."""
    middle, reach = (len(ordered) - 1) / 2, 0.98 * math.sqrt(len(ordered))
    low, high = math.floor(middle - reach), math.ceil(middle + reach)
    return ordered[max(0, low)], ordered[min(len(ordered) - 1, high)]


@dataclass(frozen=True)
class Link:
    """A model of a message's time: `latency + bytes / bandwidth`."""

    latency: float
    """Seconds."""
    bandwidth: float
    """Bytes in a second."""

    def seconds(self, size: float) -> float:
        """Return what a message of so many bytes takes."""
        return self.latency + size / self.bandwidth


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> Link | None:
    """Return the line through times of messages that is wrong by the smallest shares of them.

    By shares: else a message of a gigabyte would decide the latency.

    Returns:
        None if the times do not grow with the sizes, or there is one size only.
    """
    weights = [1 / took**2 for took in seconds]
    total = sum(weights)
    x = sum(w * size for w, size in zip(weights, sizes, strict=True)) / total
    y = sum(w * took for w, took in zip(weights, seconds, strict=True)) / total
    across = sum(w * (size - x) ** 2 for w, size in zip(weights, sizes, strict=True))
    if not across:
        return None
    together = sum(w * (size - x) * (took - y) for w, size, took in zip(weights, sizes, seconds, strict=True))
    slope = together / across
    if slope <= 0:
        return None
    return Link(max(0.0, y - slope * x), 1 / slope)


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
    """Return in how many orders of all rounds there are 0, 1, 2... pairs with the later one smaller.

    These are the coefficients of the Gaussian binomial, multiplied and divided factor by factor.
    """
    ways = [1] + [0] * (first * second)
    for many in range(1, first + 1):
        for place in range(len(ways) - 1, second + many - 1, -1):
            ways[place] -= ways[place - second - many]
        for place in range(many, len(ways)):
            ways[place] += ways[place - many]
    return ways
