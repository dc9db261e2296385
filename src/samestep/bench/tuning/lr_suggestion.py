"""The arithmetic of a range test: rates, smoothing, divergence, suggestions. Imports no torch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from samestep.errors import RangeTestError

RULES = ("steepest", "valley")
"""Where the loss falls fastest; the middle of its longest decrease."""
LEAST_STEPS = 20
_LEAST_MEASURED = 10


@dataclass(frozen=True)
class RangeTest:
    """The settings of a range test.

    Args:
        min: the first step's learning rate.
        max: the last step's.
        steps: how many steps to take from one to the other.
        smooth: the weight of the newest loss in the smoothed one.
        stop_factor: stop when the smoothed loss is so many times its lowest.

    Raises:
        RangeTestError: for settings that cannot work.
    """

    min: float = 1e-7
    max: float = 10.0
    steps: int = 100
    smooth: float = 0.05
    stop_factor: float = 4.0

    def __post_init__(self) -> None:
        if not (0 < self.min < self.max and math.isfinite(self.max)):
            raise RangeTestError(
                f"the rates go from --from {self.min:g} to --to {self.max:g}: give a --from above 0 and a larger --to"
            )
        if self.steps < LEAST_STEPS:
            raise RangeTestError(f"--steps is {self.steps}: a range test needs at least {LEAST_STEPS}")
        if not 0 < self.smooth <= 1:
            raise RangeTestError(
                f"--smooth is {self.smooth:g}: it takes the weight of the newest loss, above 0 and at "
                "most 1, where 1 does not smooth"
            )
        if not (self.stop_factor > 1 and math.isfinite(self.stop_factor)):
            raise RangeTestError(f"--stop-factor is {self.stop_factor:g}: it takes a number above 1, such as 4")

    def rate(self, step: int) -> float:
        """Return the rate of a step: it grows by the same factor each time, from `min` to `max`."""
        return self.min * float((self.max / self.min) ** (step / (self.steps - 1)))


class Curve:
    """The losses of a range test, as measured and smoothed."""

    def __init__(self, test: RangeTest) -> None:
        self.test = test
        self.losses: list[float] = []
        self.smoothed: list[float] = []
        self.stopped: str | None = None
        """Why the test ended before its last step."""
        self._average = 0.0

    def add(self, loss: float) -> None:
        """Add the loss of the next step; a divergence stops the test."""
        if not math.isfinite(loss):
            self.stop("the loss is NaN or infinite")
            return
        weight = self.test.smooth
        self._average = (1 - weight) * self._average + weight * loss
        self.losses.append(loss)
        # Divided by the weights so far: otherwise the first losses would be averaged with 0.
        self.smoothed.append(self._average / (1 - (1 - weight) ** len(self.losses)))
        if self._diverges():
            self.stop(f"the smoothed loss is over {self.test.stop_factor:g} times its lowest")

    def stop(self, why: str) -> None:
        """End the test here; the first reason counts."""
        self.stopped = self.stopped or why

    @property
    def rates(self) -> list[float]:
        """The rate of each measured loss."""
        return [self.test.rate(step) for step in range(len(self.losses))]

    def _diverges(self) -> bool:
        first, lowest = self.smoothed[0], min(self.smoothed)
        # Four times a negative loss is lower still: there, the decrease so far is the scale.
        scale = lowest if lowest > 0 else max(-lowest, first - lowest)
        return self.smoothed[-1] - lowest > (self.test.stop_factor - 1) * scale


def suggest(curve: Curve) -> dict[str, float]:
    """Return the suggested rate by rule. Only for a curve for which `what_is_wrong` returns None."""
    found = _falling_part(curve)
    smoothed = [curve.smoothed[step] for step in found]
    steps = {"steepest": found[_steepest(smoothed)], "valley": found[_middle_of_longest_fall(smoothed)]}
    return {rule: rounded(curve.test.rate(step)) for rule, step in steps.items()}


def rounded(rate: float) -> float:
    """Rounded to three digits: a range test is not more precise."""
    return float(f"{rate:.3g}")


def what_is_wrong(curve: Curve) -> str | None:
    """Return why a curve allows no suggestion, and what to do; None if it does."""
    test, measured = curve.test, len(curve.losses)
    if measured < _LEAST_MEASURED:
        return (
            f"{curve.stopped} after {measured} steps already, at a rate of "
            f"{test.rate(measured):.3g}: give a --from far below {test.min:g}, or look at the task"
        )
    start, scatter = _at_first(curve)
    part = _falling_part(curve)
    lowest = curve.smoothed[part[-1]]
    if len(part) >= 3 and start - lowest > _least_fall(start, scatter, test.smooth):
        return None
    return (
        f"the loss never fell enough to suggest a rate: it was {start:.4g} at first, give or take "
        f"{scatter:.2g}, and {lowest:.4g} at its lowest, at rates from {test.min:g} to "
        f"{test.rate(measured - 1):.3g}. {_advice(curve)}"
    )


def _advice(curve: Curve) -> str:
    is_lowest_at_first = min(curve.smoothed) < curve.smoothed[_falling_part(curve)[-1]]
    if curve.stopped or is_lowest_at_first:
        return "Give a smaller --from, or look at the task"
    return "Give a larger --to or more --steps, or a larger global_batch if it only scatters"


def _at_first(curve: Curve) -> tuple[float, float]:
    """Mean and scatter of the losses while the rates are too small to change them much."""
    first = curve.losses[: max(len(curve.losses) // 5, 5)]
    # From one to the next: a loss that falls steadily is not scatter.
    squares = [(later - earlier) ** 2 for earlier, later in pairwise(first)]
    return fmean(first), math.sqrt(fmean(squares) / 2)


def _least_fall(start: float, scatter: float, smooth: float) -> float:
    """Return how far a smoothed loss must fall: scatter alone hardly ever gets that far."""
    scatter_when_smoothed = scatter * math.sqrt(smooth / (2 - smooth))
    return max(scatter, 5 * scatter_when_smoothed, 1e-3 * abs(start))


def _falling_part(curve: Curve) -> range:
    """Return the steps up to the lowest loss, without the first ones (the average settles) and the last.

    After the lowest loss a curve may fall steeply too, from the peaks of its divergence.
    """
    measured = len(curve.smoothed)
    trusted = range(measured // 10, measured - measured // 20)
    lowest = min(trusted, key=curve.smoothed.__getitem__)
    return range(trusted.start, lowest + 1)


def _steepest(losses: Sequence[float]) -> int:
    # The logarithms of the rates are evenly spaced: differences of losses are slopes.
    inner = range(1, len(losses) - 1)
    return min(inner, key=lambda place: losses[place + 1] - losses[place - 1])


def _middle_of_longest_fall(losses: Sequence[float]) -> int:
    """fastai's `valley` rule: the middle of the longest decreasing subsequence of losses."""
    lengths: list[int] = []
    ends: list[float] = []
    """Negated, for each length: the end of a subsequence that is easiest to go below."""
    for loss in losses:
        place = bisect_left(ends, -loss)
        ends[place : place + 1] = [-loss]
        lengths.append(place + 1)
    end = lengths.index(max(lengths))
    start = end - lengths[end] + 1
    third = (end - start) / 3
    return start + int(third) + int(third / 2)
