"""The table of what lanes cost, and a self-contained HTML page with a plot."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path

from samestep.lane_tuning.result import LIMIT, LaneCosts, Measured
from samestep.ui.chart import COLORS, Line, Panel, chart
from samestep.ui.page import write_page
from samestep.words import counted

_LIMIT, _MARK = "#b3261e", "#12703c"
_NUMBERS = ("ranks", "lanes x samples", "at once", "ms per step", "spread", "cost", "GPU memory")
"""Columns of numbers, in their order."""


def heading(costs: LaneCosts) -> str:
    """What was measured, in one line."""
    rounds = max(len(one.seconds) for one in costs.measured)
    return f"global batch {costs.global_batch} on {costs.device}; medians of {rounds} round(s)"


def rows(costs: LaneCosts) -> tuple[list[str], list[list[str]]]:
    """The header of the table and its rows, one for each choice in each world.

    Columns that say the same for all are left out.
    """
    table = [_cells(costs, one) for one in costs.measured]
    shown = [name for name in table[0] if any(row[name] for row in table)]
    if len(costs.worlds) == 1 and costs.worlds[0] == 1:
        shown.remove("ranks")
    return shown, [[row[name] for name in shown] for row in table]


def _cells(costs: LaneCosts, one: Measured) -> dict[str, str]:
    cost = costs.cost(one)
    times = sorted(1e3 * seconds for seconds in one.seconds)
    return {
        "ranks": str(one.world),
        "lanes x samples": f"{one.lanes} x {one.lane_batch}",
        "at once": "" if one.parallel is None else str(one.parallel),
        "ms per step": _ms(1e3 * one.median) if times else "-",
        "spread": f"{_ms(times[0])}-{_ms(times[-1])}" if times else "-",
        "cost": "-" if cost is None else f"{cost:.2f}",
        "GPU memory": "" if one.peak_bytes is None else f"{one.peak_bytes / 2**30:.2f} GB",
        "worlds": "1" if one.lanes == 1 else f"1-{one.lanes}",
    }


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds >= 10 else f"{milliseconds:.3f}"


def remarks(costs: LaneCosts) -> list[str]:
    """Why choices are left out, and what the runs logged about their speed."""
    failed = [f"{one.label}: left out: {one.failed}" for one in costs.measured if one.failed]
    return failed + [f"{one.label}: {note}" for one in costs.measured for note in one.notes]


def conclusion(costs: LaneCosts) -> str:
    """The recommendation, with its reason, in one sentence; and what to know about it."""
    best = costs.recommend()
    width = "" if best.parallel is None else f", speed.parallel_lanes: {best.parallel}"
    text = f"Recommended: lanes: {best.lanes}{width}: {best.why}."
    if best.lanes == costs.now:
        return f"{text} The config has it."
    if costs.overlap(best.lanes, costs.now):
        text += f" But the rounds of {best.lanes} and {costs.now} lanes overlap: noise may decide between them."
    return f"{text} The config has {costs.now}; other lanes are another run."


def write_html(
    costs: LaneCosts, title: str, path: Path, facts: Mapping[str, str] | None = None
) -> None:
    """Write a page with the recommendation, the table, and an interactive plot.

    Args:
        costs: What was measured.
        title: The title of the page.
        path: The file to write.
        facts: What it was measured with.
    """
    header, body = rows(costs)
    classes = ['class="number"' if name in _NUMBERS else "" for name in header]
    titles = "".join(f"<th {c}>{html.escape(n)}</th>" for n, c in zip(header, classes, strict=True))
    lines = "\n".join(_line(cells, classes) for cells in body)
    notes = "".join(f"<p>{html.escape(line)}</p>" for line in remarks(costs))
    write_page(
        path,
        title,
        f"""<h1>{html.escape(title)}</h1>
<p class="kept">{html.escape(conclusion(costs))}</p>
<p>{html.escape(heading(costs))}. Cost: the time of a step relative to the fastest choice on as many ranks.</p>
<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>
{notes}{_figure(costs)}""",
        facts,
    )


def _line(cells: list[str], classes: list[str]) -> str:
    row = "".join(
        f"<td {c}>{html.escape(cell)}</td>" for cell, c in zip(cells, classes, strict=True)
    )
    return f"<tr>{row}</tr>"


def _figure(costs: LaneCosts) -> str:
    series: dict[tuple[int, int | None], list[Measured]] = {}
    for one in costs.measured:
        if not one.failed:
            series.setdefault((one.world, one.parallel), []).append(one)
    lines = []
    for number, ((world, width), line) in enumerate(series.items()):
        name = f"{counted(world, 'rank')}" + (f", {width} lanes at once" if width else "")
        lines.append(
            Line(
                name=name, group=name, x=[one.lanes for one in line],
                y=[costs.cost(one) for one in line], color=COLORS[number % len(COLORS)], width=3,
                mark="circle",
                text=[f"{one.lanes} x {one.lane_batch}: {_ms(1e3 * one.median)} ms" for one in line],
            )
        )  # fmt: skip
    counts = sorted({one.lanes for one in costs.measured})
    label, best = f"{LIMIT:g} times the fastest", costs.recommend()
    ends = [counts[0], counts[-1]]
    lines.append(
        Line(
            name=label, group=label, x=ends, y=[LIMIT, LIMIT], color=_LIMIT, width=1, dash="dash",
            hover=False,
        )
    )  # fmt: skip
    name = f"recommended: {best.lanes}"
    lines.append(
        Line(
            name=name, group=name, x=[best.lanes], y=[best.cost], color=_MARK, joined=False,
            mark="star", hover=False,
        )
    )  # fmt: skip
    panel = Panel(
        title="what lanes cost", lines=lines, x="lanes", y="time of a step, relative", xlog=True,
        xticks=counts, zero=True, height=440,
    )  # fmt: skip
    return chart([panel])
