"""From histories to what is drawn, in a picture or on a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from samestep.report.chart import COLORS, Line, Panel
from samestep.report.curves.choice import base, title
from samestep.report.curves.history import History
from samestep.report.curves.thinning import flags, thin

_DASHES: tuple[Literal["", "dash", "dot"], ...] = ("", "dash", "dot")
_DIGITS = 7


def panels_of(histories: Sequence[History], metrics: Sequence[str]) -> list[Panel]:
    """Return the panels in the order of the metrics, a run in the same color in each.

    Args:
        histories: the runs.
        metrics: what is drawn.
    """
    together: dict[str, list[str]] = {}
    for metric in metrics:
        together.setdefault(base(metric), []).append(metric)
    return [
        Panel(title=title(name), lines=_lines(histories, members), x="step", ylog=name == "loss_scale", height=280)
        for name, members in together.items()
    ]


def _lines(histories: Sequence[History], metrics: Sequence[str]) -> list[Line]:
    present = [
        (number, history, metric)
        for number, history in enumerate(histories)
        for metric in metrics
        if metric in history.metrics
    ]
    first = min(history.metrics[metric].steps[0] for _, history, metric in present)
    last = max(history.metrics[metric].steps[-1] for _, history, metric in present)
    found = []
    for number, history, metric in present:
        series, place = history.metrics[metric], metrics.index(metric)
        # Of the steps that were skipped, the loss says why and the scale what followed.
        skipped = history.skipped if metric in ("loss", "loss_scale") else ()
        name = f"{history.label} {metric.removeprefix(base(metric))}".rstrip()
        points = thin(series, first, last)
        found.append(
            Line(
                name=name, group=history.label, x=[_round(step) for step in points.x],
                y=_rounded(points.y), low=None if points.low is None else _rounded(points.low),
                high=None if points.high is None else _rounded(points.high),
                color=COLORS[number % len(COLORS)], width=1.6,
                dash=_DASHES[(place + number // len(COLORS)) % len(_DASHES)],
                flags=[{"x": f.step, "text": f.text} for f in flags(series, skipped, first, last)],
            )
        )  # fmt: skip
    return found


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else _round(value) for value in values]


def _round(value: float) -> float:
    """To what a picture shows, which halves the page; `--json` has every bit."""
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")
