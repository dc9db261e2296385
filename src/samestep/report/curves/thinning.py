"""Many steps as few points: means with the least and the greatest beside them, nothing picked out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.report.curves.history import Series

POINTS = 500
"""Points of one curve: about one for every pixel or two."""
_FLAGS = 60


@dataclass(frozen=True)
class Thinned:
    """A curve of at most so many points."""

    x: Sequence[float]
    y: Sequence[float | None]
    """None where no value is finite."""
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    """The range of the values in each point; None if each is one value."""


@dataclass(frozen=True)
class Flag:
    """Steps close to each other that were not as they should be."""

    step: int
    text: str


def thin(series: Series, first: int, last: int, most: int = POINTS) -> Thinned:
    """Return a curve of at most `most` points.

    Args:
        first: the first step of all curves that are compared: the same steps are averaged in each.
        last: the last one.
    """
    if len(series.steps) <= most:
        values = [value if math.isfinite(value) else None for value in series.values]
        return Thinned(series.steps, values)
    x: list[float] = []
    y: list[float | None] = []
    low: list[float | None] = []
    high: list[float | None] = []
    for places in _buckets(series.steps, first, last, most):
        x.append(mean([series.steps[place] for place in places]))
        finite = [v for place in places if math.isfinite(v := series.values[place])]
        y.append(mean(finite) if finite else None)
        low.append(min(finite, default=None))
        high.append(max(finite, default=None))
    return Thinned(x, y, low, high)


def flags(series: Series, skipped: Sequence[int], first: int, last: int) -> list[Flag]:
    """Return where values are NaN or infinite, and where steps were skipped; neighbours are one flag."""
    bad = {step for step, v in zip(series.steps, series.values, strict=True) if not math.isfinite(v)}
    left_out = set(skipped)
    steps = sorted(bad | left_out)
    found = []
    for places in _buckets(steps, first, last, _FLAGS) if len(steps) > _FLAGS else _each(steps):
        here = [steps[place] for place in places]
        counts = [(sum(step in bad for step in here), "NaN or infinite")]
        counts.append((sum(step in left_out for step in here), "skipped"))
        if len(here) == 1:
            text = f"step {here[0]}: " + ", ".join(word for count, word in counts if count)
        else:
            words = ", ".join(f"{count} {word}" for count, word in counts if count)
            text = f"steps {here[0]} to {here[-1]}: {words}"
        found.append(Flag(here[0], text))
    return found


def _each(steps: Sequence[int]) -> list[list[int]]:
    return [[place] for place in range(len(steps))]


def _buckets(steps: Sequence[int], first: int, last: int, most: int) -> list[list[int]]:
    """Places in `steps` by equal ranges of steps; ranges without any are left out."""
    width = max(1, last - first + 1)
    found: dict[int, list[int]] = {}
    for place, step in enumerate(steps):
        found.setdefault((step - first) * most // width, []).append(place)
    return list(found.values())


def mean(values: Sequence[float]) -> float:
    """Return the mean of finite values; of equal ones, their value."""
    # Divided first: the sum of large losses may be infinite. Not rounded beyond its values.
    middle = sum(value / len(values) for value in values)
    return min(max(middle, min(values)), max(values))
