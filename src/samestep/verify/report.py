"""The result of a verification as text, and as one self-contained HTML page."""

from __future__ import annotations

import html
from pathlib import Path

from samestep.ui.page import require_plotly, write_page
from samestep.verify.result import Verification, WorldResult

_PROMISES = {
    "bits": "identical bits: every loss, and every tensor of the final state",
    "rounding": "equal up to rounding: every loss, and the weights, within {rtol:g} relative",
    "samples": "the same samples in every step",
}


def promise(result: Verification) -> str:
    """What the config's level of sameness promises, as a phrase."""
    return _PROMISES[result.same].format(rtol=result.rtol)


def verdict(result: Verification) -> str:
    """`kept` or `NOT kept`."""
    return "kept" if result.kept else "NOT kept"


def write_report(result: Verification, title: str, path: Path) -> None:
    """Write a page with the verdict, a table, the loss curves and their difference per step.

    Args:
        result: the verification.
        title: what was verified, for the heading.
        path: the file to write.
    """
    rows = "\n".join(_row(world) for world in result.worlds)
    against = ""
    if result.against:
        words = "agrees" if result.against_difference is None else str(result.against_difference)
        against = (
            f"<p>Against the given curve ({len(result.against)} steps): {html.escape(words)}.</p>"
        )
    suspect = "" if result.suspect is None else f"<p>{html.escape(str(result.suspect))}</p>"
    body = f"""<h1>{html.escape(title)}: the promise was
<span class="{"kept" if result.kept else "broken"}">{verdict(result)}</span></h1>
<p><code>same: {html.escape(result.same)}</code> promises {html.escape(promise(result))}.
Compared with the run on {html.escape(result.worlds[0].label)} rank(s).</p>
<table><thead><tr><th class="number">ranks</th><th class="number">steps</th>
<th class="number">ms per step</th><th>state</th><th>result</th></tr></thead>
<tbody>{rows}</tbody></table>
{suspect}
{against}
{_figure(result)}"""
    write_page(path, f"samestep verify: {title}", body)


def _row(world: WorldResult) -> str:
    record = world.record
    mark = "kept" if world.kept else "broken"
    return (
        f'<tr><td class="number">{html.escape(world.label)}</td><td class="number">{record.steps}</td>'
        f'<td class="number">{record.seconds_per_step * 1e3:.1f}</td>'
        f"<td><code>{html.escape(record.state_hash)}</code></td>"
        f'<td class="{mark}">{html.escape(str(world))}</td></tr>'
    )


def _figure(result: Verification) -> str:
    go = require_plotly()
    from plotly.colors import qualitative
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        row_heights=[0.65, 0.35],
        vertical_spacing=0.09,
        subplot_titles=("loss", "difference from the first run, relative to its loss"),
    )
    first, widest = result.worlds[0].record.losses, 2 + 2 * len(result.worlds)
    for number, world in enumerate(result.worlds):
        # Plotly reads names and titles as HTML, too.
        losses, name = world.record.losses, f"{html.escape(world.label)} rank(s)"
        # Ever thinner, so that curves which coincide can all be seen.
        line = {"width": widest - 2 * number, "color": qualitative.Safe[number % 11]}
        gaps = [abs(a - b) / abs(a) if a else 0.0 for a, b in zip(first, losses, strict=False)]
        figure.add_trace(go.Scatter(y=losses, name=name, mode="lines", line=line), row=1, col=1)
        thin = {**line, "width": 2}
        figure.add_trace(go.Scatter(y=gaps, line=thin, showlegend=False), row=2, col=1)
    if result.against:
        dotted = {"dash": "dot", "color": "black"}
        figure.add_trace(
            go.Scatter(y=result.against, name="given curve", line=dotted), row=1, col=1
        )
    figure.update_xaxes(title_text="step", row=2, col=1)
    figure.update_yaxes(exponentformat="e", rangemode="tozero", row=2, col=1)
    figure.update_layout(template="plotly_white", height=620, margin={"t": 40, "l": 60, "r": 20})
    html_text: str = figure.to_html(full_html=False, include_plotlyjs=True)
    return html_text
