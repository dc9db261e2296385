"""Plots of a range test: a PNG file, and a self-contained HTML page."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from samestep.errors import MissingExtraError
from samestep.lr_finder.range_test import RangeTestResult
from samestep.ui.page import require_plotly, write_page

_RAW, _SMOOTHED, _NOW = "#9db4c8", "#1f5f99", "#6b7580"
_MARKS = {"steepest": "#c2571a", "valley": "#12703c"}
_MARGIN = 0.06


def write_png(found: RangeTestResult, title: str, path: Path) -> None:
    """Draw the curve with its suggestions into a PNG file.

    Args:
        found: the result of a range test.
        title: the title of the plot.
        path: the file to write.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("the PNG plot", "plots") from None
    # Without pyplot: this needs no display and changes no global state.
    figure = Figure(figsize=(8, 5), dpi=130, layout="constrained")
    axes = figure.subplots()
    axes.plot(found.rates, found.losses, color=_RAW, linewidth=1, alpha=0.6, label="loss")
    axes.plot(found.rates, found.smoothed, color=_SMOOTHED, linewidth=2.2, label="smoothed loss")
    if _includes_rate_now(found):
        now = f"now  {found.rate_now:.3g}"
        axes.axvline(found.rate_now, color=_NOW, linestyle=":", linewidth=1.2, label=now)
    for rule, rate in found.suggestions.items():
        axes.axvline(rate, color=_MARKS[rule], linestyle="--", linewidth=1.2)
        point = ([rate], [_loss_at(found, rate)])
        label = f"{rule}  {rate:.3g}"
        axes.plot(*point, "o", color=_MARKS[rule], markersize=8, label=label, zorder=5)
    axes.set_xscale("log")
    axes.set_ylim(*_loss_limits(found))
    axes.set_xlabel(_rate_title(found))
    axes.set_ylabel("loss")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def write_html(found: RangeTestResult, title: str, path: Path) -> None:
    """Write a page with the suggestions, or why there are none, and an interactive curve.

    Args:
        found: the result of a range test.
        title: the title of the page.
        path: the file to write.
    """
    rows = "\n".join(
        f'<tr><td>{html.escape(rule)}</td><td class="number">{rate:.3g}</td>'
        f'<td class="number">{_loss_at(found, rate):.4f}</td></tr>'
        for rule, rate in found.suggestions.items()
    )
    table = (
        "<table><thead><tr><th>rule</th><th class='number'>learning rate</th>"
        f"<th class='number'>smoothed loss there</th></tr></thead><tbody>{rows}</tbody></table>"
    )
    if found.wrong:
        table = f'<p class="broken">No suggestion: {html.escape(found.wrong)}.</p>'
    measured = f"{len(found.losses)} of {found.test.steps} steps"
    ended = f"{measured}: {found.stopped}" if found.stopped else measured
    body = f"""<h1>{html.escape(title)}</h1>
{table}
<p>Rates from {found.test.min:g} to {found.test.max:g}; {html.escape(ended)}.
The config's rate is {found.rate_now:.3g} now.</p>
{_figure(found)}"""
    write_page(path, title, body)


def _figure(found: RangeTestResult) -> str:
    go = require_plotly()
    figure = go.Figure()
    x = list(found.rates)
    raw = {"color": _RAW, "width": 1}
    strong = {"color": _SMOOTHED, "width": 3}
    figure.add_trace(go.Scatter(x=x, y=list(found.losses), name="loss", line=raw, opacity=0.6))
    figure.add_trace(go.Scatter(x=x, y=list(found.smoothed), name="smoothed loss", line=strong))
    # Lines as traces: the label of a vline is misplaced on a logarithmic axis.
    if _includes_rate_now(found):
        now = {"color": _NOW, "dash": "dot", "width": 1}
        figure.add_trace(
            _vertical_line(go, found, found.rate_now, now, f"now {found.rate_now:.3g}")
        )
    for rule, rate in found.suggestions.items():
        dashed = {"color": _MARKS[rule], "dash": "dash", "width": 1}
        figure.add_trace(_vertical_line(go, found, rate, dashed, f"{rule} {rate:.3g}"))
        point = {"x": [rate], "y": [_loss_at(found, rate)], "showlegend": False}
        marker = {"color": _MARKS[rule], "size": 11}
        figure.add_trace(go.Scatter(**point, mode="markers", marker=marker, name=rule))
    figure.update_xaxes(type="log", title_text=html.escape(_rate_title(found)), exponentformat="e")
    figure.update_yaxes(title_text="loss", range=list(_loss_limits(found)))
    figure.update_layout(template="plotly_white", height=520, margin={"t": 40, "l": 60, "r": 20})
    html_text: str = figure.to_html(full_html=False, include_plotlyjs=True)
    return html_text


def _vertical_line(
    go: Any, found: RangeTestResult, rate: float, line: dict[str, Any], name: str
) -> Any:
    return go.Scatter(x=[rate, rate], y=_loss_limits(found), mode="lines", line=line, name=name)


def _rate_title(found: RangeTestResult) -> str:
    return f"learning rate ({found.key})" if found.key else "learning rate"


def _includes_rate_now(found: RangeTestResult) -> bool:
    return bool(found.rates) and found.rates[0] <= found.rate_now <= found.rates[-1]


def _loss_at(found: RangeTestResult, rate: float) -> float:
    """The smoothed loss at the measured rate that is nearest to a rounded one."""
    nearest = min(range(len(found.rates)), key=lambda place: abs(found.rates[place] / rate - 1))
    return found.smoothed[nearest]


def _loss_limits(found: RangeTestResult) -> tuple[float, float]:
    """The visible range: in a divergence single losses may be far above the smoothed curve."""
    low, high = min(found.losses, default=0.0), max(found.smoothed, default=1.0)
    margin = _MARGIN * (high - low) or 0.1
    return low - margin, high + margin
