"""Turns histories into what is drawn, in a picture or on a page: which metrics, in which order, over which axis."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Literal, get_args

from samestep.errors import RunDirError
from samestep.report.chart import COLORS, Line, Panel
from samestep.report.curves.history import History
from samestep.report.curves.thinning import flags, thin

_DASHES: tuple[Literal["", "dash", "dot"], ...] = ("", "dash", "dot")
_DIGITS = 7
_VALIDATION = "val_"


def panels_of(
    histories: Sequence[History], metrics: Sequence[str], x: AxisName = "step", smooth: float = 0.0
) -> list[Panel]:
    """Return the panels in the order of the metrics, a run in the same color in each.

    A metric and its `val_` counterpart share a panel, and so do the values of one list.

    Args:
        smooth: The weight of the past in the running means, from 0 to below 1.

    Raises:
        RunDirError: If a run has no numbers for that axis.
    """
    together: dict[str, list[str]] = {}
    for metric in metrics:
        together.setdefault(_panel_name(metric, metrics), []).append(metric)
    places = [axes_of(history) for history in histories]
    for history, known in zip(histories, places, strict=True):
        if x not in known and history.metrics:
            raise RunDirError(f"{history.run} has no numbers by {x}: there are {', '.join(known)}")
    return [
        Panel(
            title=title(name), lines=_lines(histories, places, members, x), x=x, ylog=name == "loss_scale",
            height=280, smooth=smooth,
        )
        for name, members in together.items()
    ]  # fmt: skip


def _panel_name(metric: str, metrics: Sequence[str]) -> str:
    """Return what the curves of one panel have in common: `loss` for `val_loss`, if both are drawn."""
    trained = metric.removeprefix(_VALIDATION)
    return base(trained if trained in metrics else metric)


def _lines(histories: Sequence[History], places: Sequence[Axes], metrics: Sequence[str], x: AxisName) -> list[Line]:
    present = [
        (number, history, metric)
        for number, history in enumerate(histories)
        for metric in metrics
        if metric in history.metrics
    ]
    first = min(history.metrics[metric].steps[0] for _, history, metric in present)
    last = max(history.metrics[metric].steps[-1] for _, history, metric in present)
    shared = [name for name in AXES if all(name in places[number] for number, _, _ in present)]
    found = []
    for number, history, metric in present:
        series, place = history.metrics[metric], metrics.index(metric)
        # Of the steps that were skipped, the loss says why and the scale what followed.
        skipped = history.skipped if metric in ("loss", "loss_scale") else ()
        points = thin(series, first, last)
        axes: dict[str, list[float]] = {
            name: [_round(places[number][name](step)) for step in points.x] for name in shared
        }
        at = places[number][x]
        found.append(
            Line(
                name=f"{history.label} {_suffix(metric, metrics)}".rstrip(), group=history.label, x=axes[x],
                y=_rounded(points.y), low=None if points.low is None else _rounded(points.low),
                high=None if points.high is None else _rounded(points.high),
                color=COLORS[number % len(COLORS)], width=1.6,
                dash=_DASHES[(place + number // len(COLORS)) % len(_DASHES)],
                flags=[{"x": _round(at(f.step)), "text": f.text} for f in flags(series, skipped, first, last)],
                axes=axes if len(shared) > 1 else {},
            )
        )  # fmt: skip
    return found


def _suffix(metric: str, metrics: Sequence[str]) -> str:
    """Return in what a curve differs from the others of its panel."""
    place = metric.removeprefix(base(metric))
    trained = metric.removeprefix(_VALIDATION)
    return f"validation {place}".rstrip() if trained != metric and trained in metrics else place


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else _round(value) for value in values]


def _round(value: float) -> float:
    """Round to what a picture shows, which halves the page; `--json` has every bit."""
    return int(value) if float(value).is_integer() else float(f"{value:.{_DIGITS}g}")


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


_FIRST = ("loss", "loss/*")
_LAST = ("lr", "grad_norm", "loss_scale", "samples_per_second", "peak_memory_mb")
_ON_REQUEST = ("epoch", "count", "seconds", "time_*", "rank_spread", "slowest_rank")
"""Metrics of every run that are seldom drawn: `samestep show` prints them."""
MOST_PANELS = 60
_TITLES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "loss_scale": "loss scale",
    "samples_per_second": "samples per second",
    "peak_memory_mb": "peak memory in MB",
}


def known_metrics(histories: Sequence[History]) -> list[str]:
    """Return the names of all that was measured, in the order of the first run that has it."""
    return list(dict.fromkeys(name for history in histories for name in history.metrics))


def choose(histories: Sequence[History], wanted: Sequence[str]) -> list[str]:
    """Return the metrics to draw: what is wanted, or what a person follows.

    Args:
        histories: the runs.
        wanted: names, also with the wildcards `*` and `?`; `lr` is all of `lr[0]`, `lr[1]`.

    Raises:
        RunDirError: if there is nothing, or nothing of such a name.
    """
    known = known_metrics(histories)
    if not known:
        raise RunDirError(
            f"{', '.join(str(history.run) for history in histories)}: no numbers yet: they come "
            "with every log_every steps"
        )
    if not wanted:
        return _followed(known)
    chosen: dict[str, None] = {}
    for name in wanted:
        matching = [one for one in known if _matches(one, name)]
        if not matching:
            raise RunDirError(f"no run has a metric {name!a}: there are {', '.join(known)}")
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def base(metric: str) -> str:
    """Return what the curves of one list have in common: `lr` for `lr[0]`."""
    return re.sub(r"\[[0-9]+\]$", "", metric)


def title(metric: str) -> str:
    """Return what a person calls it."""
    return _TITLES.get(metric, metric)


def _followed(known: Sequence[str]) -> list[str]:
    def named(patterns: Sequence[str]) -> list[str]:
        return [name for pattern in patterns for name in known if _matches(name, pattern)]

    first, last, hidden = named(_FIRST), named(_LAST), named(_ON_REQUEST)
    own = [name for name in known if name not in {*first, *last, *hidden}]
    return [*first, *own, *last] or list(known)


def _matches(name: str, pattern: str) -> bool:
    return pattern in (name, base(name)) or fnmatchcase(name, pattern)
