"""Detects memory that grows with every step. No torch here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.bench.statistics import Spread

_WARM_UP = 0.25
"""Share of the steps that do not count: allocators, caches and logs fill up at first."""
_WINDOWS = 20
LEAST_GROWTH = 1 << 20
"""Bytes over all steps: less is how anything that counts and caches creeps."""
LEAST_RESIDENT_GROWTH = 32 << 20
"""Least growth of resident memory that counts: allocators keep more of it, and return some, as they like."""
_OF_JITTER = 3
"""Times what memory moves within a window: growth must exceed that, too."""
_FEWEST = 8
"""Points of a line whose range means something."""


@dataclass(frozen=True)
class Growth:
    """The change of memory over the steps of a run."""

    steps: int
    slope: Spread
    """Bytes per step, and between what they are in about 95 of 100 measurements."""
    leaks: bool


def growth_of(held: Sequence[int], least_growth: int = LEAST_GROWTH) -> Growth:
    """Return how memory grows, from what was held after each step.

    The least of each window counts, since garbage comes and goes. It is a leak if the line rises, also
    through the later half alone, where what only fills up once no longer does, and by more than noise.

    Args:
        least_growth: Over all steps, in bytes; less is no leak.
    """
    at, least = windowed_minima(held)
    whole = theil_sen(at, least)
    half = len(at) // 2
    later = theil_sen(at[half:], least[half:])
    rises = whole.low > 0 and later.low > 0
    grown = whole.median * (at[-1] - at[0])
    jitter = statistics.median(max(window) - min(window) for _, window in _windows(held))
    return Growth(len(held), whole, rises and grown >= max(least_growth, _OF_JITTER * jitter))


def windowed_minima(held: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return the middles of windows of steps after the warm-up, and the least that was held in each."""
    windows = _windows(held)
    return [middle for middle, _ in windows], [float(min(window)) for _, window in windows]


def _windows(held: Sequence[int]) -> list[tuple[float, Sequence[int]]]:
    first = int(len(held) * _WARM_UP)
    size = max(1, (len(held) - first) // _WINDOWS)
    starts = range(first, len(held) - size + 1, size)
    return [(start + (size - 1) / 2, held[start : start + size]) for start in starts]


def theil_sen(x: Sequence[float], y: Sequence[float]) -> Spread:
    """Return the median of the slopes between all pairs of points, with Sen's range for it."""
    count = len(x)
    slopes = sorted((y[b] - y[a]) / (x[b] - x[a]) for a in range(count) for b in range(a + 1, count))
    if count < _FEWEST:
        return Spread(statistics.median(slopes or [0.0]), -math.inf, math.inf)
    reach = 1.96 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = math.floor((len(slopes) - reach) / 2)
    high = math.ceil((len(slopes) + reach) / 2)
    return Spread(statistics.median(slopes), slopes[max(0, low)], slopes[min(len(slopes) - 1, high)])
