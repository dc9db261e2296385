"""Each curve in numbers: last, best, mean; for a terminal, and for scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from samestep.report.curves.history import History, Series
from samestep.report.curves.thinning import mean, thin
from samestep.report.run_facts import run_facts

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 15


@dataclass(frozen=True)
class Summary:
    """One metric of one run; None where no value is finite."""

    points: int
    last: float | None
    last_step: int
    best: float | None
    """None also if it is not known whether lower or higher is better."""
    best_step: int | None
    mean: float | None
    min: float | None
    max: float | None
    nonfinite: int


def summarize(history: History, metric: str) -> Summary:
    """Return the numbers of a curve."""
    series = history.metrics[metric]
    finite = [(value, step) for step, value in zip(series.steps, series.values, strict=True) if math.isfinite(value)]
    values = [value for value, _ in finite]
    better, best = history.better(metric), None
    if finite and better is not None:
        sign = 1 if better == "min" else -1
        best = min(finite, key=lambda pair: (sign * pair[0], pair[1]))  # the earliest of equals
    last = series.values[-1]
    return Summary(
        points=len(series.steps),
        last=last if math.isfinite(last) else None,
        last_step=series.steps[-1],
        best=None if best is None else best[0],
        best_step=None if best is None else best[1],
        mean=mean(values) if values else None,
        min=min(values, default=None),
        max=max(values, default=None),
        nonfinite=len(series.values) - len(values),
    )


def table(histories: Sequence[History], metrics: Sequence[str]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and the rows, one for each metric and run."""
    header = ("metric", "run", "curve", "last", "best", "at step", "mean", "min", "max", "")
    return header, [
        (
            metric, history.label, sparkline(history.metrics[metric]), _text(one.last),
            _text(one.best), "" if one.best_step is None else str(one.best_step), _text(one.mean),
            _text(one.min), _text(one.max), ", ".join(_remarks(history, metric, one)),
        )
        for metric in metrics
        for history in histories
        if metric in history.metrics
        for one in [summarize(history, metric)]
    ]  # fmt: skip


def as_json(histories: Sequence[History], metrics: Sequence[str]) -> dict[str, Any]:
    """Return what `--json` prints: every value; null where one is NaN or infinite."""
    return {
        "runs": {
            history.label: {
                "path": str(history.run),
                "facts": run_facts(history.run),
                "skipped_steps": list(history.skipped),
                "metrics": {name: _series_json(history, name) for name in metrics if name in history.metrics},
            }
            for history in histories
        }
    }


def sparkline(series: Series) -> str:
    """Return a curve in one line of text; `x` where no value is finite."""
    values = thin(series, series.steps[0], series.steps[-1], _WIDTH).y
    finite = [value for value in values if value is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    # Halved, since the range of the largest numbers is none.
    span = high / 2 - low / 2
    return "".join(
        "x" if value is None else _BARS[round(7 * ((value / 2 - low / 2) / span)) if span else 0] for value in values
    )


def _series_json(history: History, name: str) -> dict[str, Any]:
    series = history.metrics[name]
    values = [value if math.isfinite(value) else None for value in series.values]
    return {"steps": list(series.steps), "values": values, "summary": asdict(summarize(history, name))}


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _remarks(history: History, metric: str, one: Summary) -> Iterator[str]:
    if one.nonfinite:
        yield f"{one.nonfinite} not finite"
    if metric == "loss" and history.skipped:
        yield f"{len(history.skipped)} skipped"
