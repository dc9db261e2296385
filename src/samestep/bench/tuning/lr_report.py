"""Plots of a range test: a PNG file, and a self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from samestep.bench.tuning.lr_range_test import RangeTestResult
from samestep.report.chart import Line, Panel, chart
from samestep.report.page import write_page
from samestep.report.picture import write_panels
from samestep.report.table import html_table

_RAW, _SMOOTHED, _NOW = "#9db4c8", "#1f5f99", "#6b7580"
_MARKS = {"steepest": "#c2571a", "valley": "#12703c"}
_MARGIN = 0.06


def write_png(found: RangeTestResult, title: str, path: Path) -> None:
    """Draw the curve with its suggestions into a PNG file.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    write_panels(title, [_panel(found)], path, force=True)


def write_html(found: RangeTestResult, title: str, path: Path, facts: Mapping[str, str] | None = None) -> None:
    """Write a page with the suggestions, or why there are none, and an interactive curve."""
    columns = ("rule", "learning rate", "smoothed loss there")
    rows = [(rule, f"{rate:.3g}", f"{_loss_at(found, rate):.4f}") for rule, rate in found.suggestions.items()]
    table = html_table(columns, rows, numbers=columns[1:])
    if found.wrong:
        table = f'<p class="broken">No suggestion: {html.escape(found.wrong)}.</p>'
    measured = f"{len(found.curve.losses)} of {found.curve.test.steps} steps"
    ended = f"{measured}: {found.curve.stopped}" if found.curve.stopped else measured
    body = f"""<h1>{html.escape(title)}</h1>
{table}
<p>Rates from {found.curve.test.min:g} to {found.curve.test.max:g}; {html.escape(ended)}.
The config's rate is {found.rate_now:.3g} now.</p>
{chart([_panel(found)])}"""
    write_page(path, title, body, facts)


def _panel(found: RangeTestResult) -> Panel:
    x, limits = list(found.curve.rates), _loss_limits(found)
    lines = [
        Line(name="loss", group="loss", x=x, y=found.curve.losses, color=_RAW, width=1, opacity=0.6),
        Line(name="smoothed loss", group="smoothed loss", x=x, y=found.curve.smoothed, color=_SMOOTHED, width=3),
    ]
    if _includes_rate_now(found):
        name = f"now {found.rate_now:.3g}"
        lines.append(_upright(name, found.rate_now, limits, _NOW, "dot"))
    for rule, rate in found.suggestions.items():
        name, color = f"{rule} {rate:.3g}", _MARKS[rule]
        lines.append(_upright(name, rate, limits, color, "dash"))
        lines.append(
            Line(name=rule, group=name, x=[rate], y=[_loss_at(found, rate)], color=color, joined=False, mark="circle")
        )
    return Panel(
        title="loss over learning rate", lines=lines, x=_rate_title(found), y="loss", xlog=True,
        yrange=limits, height=460, full=True,
    )  # fmt: skip


def _upright(name: str, rate: float, limits: tuple[float, float], color: str, dash: Literal["dash", "dot"]) -> Line:
    return Line(name=name, group=name, x=[rate, rate], y=limits, color=color, width=1.2, dash=dash, hover=False)


def _rate_title(found: RangeTestResult) -> str:
    return f"learning rate ({found.key})" if found.key else "learning rate"


def _includes_rate_now(found: RangeTestResult) -> bool:
    return bool(found.curve.rates) and found.curve.rates[0] <= found.rate_now <= found.curve.rates[-1]


def _loss_at(found: RangeTestResult, rate: float) -> float:
    """Return the smoothed loss at the measured rate that is nearest to a rounded one."""
    nearest = min(range(len(found.curve.rates)), key=lambda place: abs(found.curve.rates[place] / rate - 1))
    return found.curve.smoothed[nearest]


def _loss_limits(found: RangeTestResult) -> tuple[float, float]:
    """Return the visible range: in a divergence single losses may be far above the smoothed curve."""
    low, high = min(found.curve.losses, default=0.0), max(found.curve.smoothed, default=1.0)
    margin = _MARGIN * (high - low) or 0.1
    return low - margin, high + margin
