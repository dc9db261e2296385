"""From histories to what is drawn, in a picture or on a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from samestep.errors import RunDirError
from samestep.report.chart import COLORS, Line, Panel
from samestep.report.curves.axes import AXES, Axes, AxisName, axes_of
from samestep.report.curves.choice import base, title
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
    """To what a picture shows, which halves the page; `--json` has every bit."""
    return int(value) if float(value).is_integer() else float(f"{value:.{_DIGITS}g}")
