"""From histories to what is drawn, on paper or on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from samestep.report.chart import COLORS
from samestep.report.curves.choice import base, title
from samestep.report.curves.history import History
from samestep.report.curves.thinning import Flag, Thinned, flags, thin

_STYLES: tuple[Literal["-", "--", ":"], ...] = ("-", "--", ":")


@dataclass(frozen=True)
class Curve:
    """One metric of one run, as it is drawn."""

    run: str
    name: str
    color: str
    style: Literal["-", "--", ":"]
    points: Thinned
    flags: Sequence[Flag] = ()


@dataclass(frozen=True)
class CurvePanel:
    """One metric of all runs; the curves of a list, such as several learning rates, are together."""

    title: str
    curves: Sequence[Curve]
    log: bool = False


def panels_of(histories: Sequence[History], metrics: Sequence[str]) -> list[CurvePanel]:
    """The panels in the order of the metrics, a run in the same color in each.

    Args:
        histories: the runs.
        metrics: what is drawn.
    """
    together: dict[str, list[str]] = {}
    for metric in metrics:
        together.setdefault(base(metric), []).append(metric)
    return [
        CurvePanel(title(name), _curves(histories, members), log=name == "loss_scale")
        for name, members in together.items()
    ]


def _curves(histories: Sequence[History], metrics: Sequence[str]) -> list[Curve]:
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
        part = metric.removeprefix(base(metric))
        found.append(
            Curve(
                history.label, f"{history.label} {part}".rstrip(), COLORS[number % len(COLORS)],
                _STYLES[(place + number // len(COLORS)) % len(_STYLES)],
                thin(series, first, last), flags(series, skipped, first, last),
            )
        )  # fmt: skip
    return found
