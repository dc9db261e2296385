"""The horizontal axes of curves: step, epoch, seconds or samples. No torch here."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from samestep.report.curves.history import History

AxisName = Literal["step", "epoch", "seconds", "samples"]
Axes = Mapping["AxisName", Callable[[float], float]]
"""From a step to its place, by the axis."""
AXES: tuple[AxisName, ...] = get_args(AxisName)


def axes_of(history: History) -> Axes:
    """Return a function from a step to its place on each axis that the run's numbers give.

    The seconds are those of steps: pauses between them, and the time before a resume, are not counted. Samples are
    full global batches.
    """
    found: dict[AxisName, Callable[[float], float]] = {"step": float}
    if (epochs := history.metrics.get("epoch")) is not None and all(map(math.isfinite, epochs.values)):
        found["epoch"] = _epochs(epochs.steps, epochs.values)
    if (seconds := history.metrics.get("seconds")) is not None and all(map(math.isfinite, seconds.values)):
        found["seconds"] = _Interpolation([*seconds.steps, seconds.steps[-1] + 1], [0.0, *accumulate(seconds.values)])
    if history.global_batch:
        found["samples"] = float(history.global_batch).__mul__
    return found


@dataclass(frozen=True)
class _Interpolation:
    """A line through points of ascending x, and its last piece beyond them."""

    x: Sequence[float]
    y: Sequence[float]

    def __call__(self, at: float) -> float:
        place = min(max(bisect_right(self.x, at) - 1, 0), len(self.x) - 2)
        low, high = self.x[place], self.x[place + 1]
        share = (at - low) / (high - low)
        return self.y[place] + share * (self.y[place + 1] - self.y[place])


def _epochs(steps: Sequence[int], values: Sequence[float]) -> Callable[[float], float]:
    """Return epochs with their fractions; an epoch that has just begun is as long as the one before it."""
    starts: dict[float, int] = {}
    for step, epoch in zip(steps, values, strict=True):
        starts.setdefault(epoch, step)
    first = sorted(starts.items())
    longest = first[-1][1] - first[-2][1] if len(first) > 1 else 0
    end = first[-1][1] + max(longest, steps[-1] + 1 - first[-1][1])
    return _Interpolation([*(step for _, step in first), end], [*(epoch for epoch, _ in first), first[-1][0] + 1])
