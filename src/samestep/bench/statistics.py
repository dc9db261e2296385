"""Figures with their spread, lines through them, and ratios by ranks, which assume no distribution. No torch here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WORTH = 1.1
"""A choice that is so many times as fast is recommended in place of a simpler one."""


@dataclass(frozen=True)
class Spread:
    """A median, and where the true one lies in about 95 of 100 measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Spread:
        """Return the spread that a result's row has."""
        return cls(*(float(row[name]) for name in ("median", "low", "high")))


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
    if len(set(sizes)) < 2:
        return None
    import numpy as np

    slope, latency = np.polyfit(sizes, seconds, 1, w=[1 / took for took in seconds])
    return Link(max(0.0, float(latency)), float(1 / slope)) if slope > 0 else None


def is_clearly_faster(speedup: Spread) -> bool:
    """Return whether a speedup is worth having, and no noise."""
    return speedup.median >= WORTH and speedup.low > 1


def ratio_of(reference: Sequence[float], seconds: Sequence[float]) -> Spread:
    """Return the spread of the rounds' ratios: what disturbs a whole round disturbs both."""
    return spread_of([mine / other for mine, other in zip(seconds, reference, strict=True)])


def ratio_confidence_interval(after: Sequence[float], before: Sequence[float]) -> Spread:
    """Return how many times larger, with its 95 % range.

    All ratios of a round after to a round before; their median is the estimate of Hodges and Lehmann, and the
    range is that of the rank test of Mann and Whitney, by its normal approximation: it excludes 1 if and only if
    that test finds a difference. With few rounds, it holds all ratios.
    """
    ratios = sorted(late / early for late in after for early in before)
    first, second = len(after), len(before)
    deviation = math.sqrt(first * second * (first + second + 1) / 12)
    outside = max(0, math.floor(first * second / 2 - 1.96 * deviation - 0.5))
    return Spread(statistics.median(ratios), ratios[outside], ratios[-1 - outside])
