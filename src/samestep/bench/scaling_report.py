"""Presents times of steps on growing numbers of ranks. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samestep.bench.document import Document
from samestep.bench.presentation import Presentation, Table
from samestep.bench.scaling_figures import PHASES, verdicts
from samestep.report.chart import COLORS, Line, Panel
from samestep.report.format import format_bytes, format_seconds

Row = Mapping[str, Any]
STEP_COLUMNS = (
    "mode", "ranks", "loop", "lanes", "batch", "step", "95 % range", "samples/s", "efficiency", "to DDP", "noise",
)  # fmt: skip
_UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "us"))
PHASE_COLUMNS = ("mode", "ranks", *PHASES, "memory of a rank")


def present(document: Document) -> Presentation:
    """Return how it is shown: efficiency and time against ranks, the split of a step, and all rows."""
    rows = document.rows
    split = [row for row in rows if row["phases"] is not None]
    tables = [
        Table(
            "Steps", STEP_COLUMNS, [_step_cells(row) for row in rows],
            "Efficiency is against the same loop on the fewest ranks; to DDP is the median of the rounds' ratios, "
            "with its 95 % range; noise is the ratio of one loop measured twice.",
        ),
        Table(
            "Where a step's time goes", PHASE_COLUMNS, [_phase_cells(row) for row in split],
            "Of samestep, in steps of their own: wait is for the slowest rank, exchange what is left of it and not "
            "hidden behind the backward pass.",
        ),
    ]  # fmt: skip
    return Presentation(
        title="What more ranks bring",
        heading=_heading(document),
        panels=_panels(rows),
        tables=tables,
        verdicts=verdicts(rows),
    )


def _heading(document: Document) -> str:
    rows = document.rows
    rounds = max(len(row["seconds"]) for row in rows)
    hosts = ", ".join(document.machine["hosts"])
    names = ", ".join(sorted({f"{row['workload']} in {row['precision']}" for row in rows}))
    return f"{names} on {hosts} ({document.machine['device']}); medians of {rounds} rounds"


def shown_spread(found: Mapping[str, float] | None, digits: int = 2) -> str:
    """Return a ratio with its range."""
    if found is None:
        return "-"
    return f"{found['median']:.{digits}f} ({found['low']:.{digits}f} - {found['high']:.{digits}f})"


def _step_cells(row: Row) -> tuple[str, ...]:
    return (
        row["mode"],
        str(row["world"]),
        row["variant"],
        str(row["lanes"]),
        str(row["global_batch"]),
        format_seconds(row["median"]),
        f"{format_seconds(row['low'])} - {format_seconds(row['high'])}",
        f"{row['samples_per_second']:.4g}",
        shown_spread(row["efficiency"]),
        "-" if row["variant"] == "ddp" else shown_spread(row["ratio_to_ddp"], 3),
        "-" if row["control"] is None else f"{row['control']['median']:.3f}",
    )


def _phase_cells(row: Row) -> tuple[str, ...]:
    phases = [_phase(row["phases"][name]) for name in PHASES]
    memory = max(one["memory_bytes"] for one in row["ranks"])
    return (row["mode"], str(row["world"]), *phases, format_bytes(memory))


def _phase(found: Mapping[str, Any]) -> str:
    """Return a time with its range, in one unit."""
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if found["high"] * scale >= 1), _UNITS[-1])
    median, low, high = (f"{scale * found[name]:.3g}" for name in ("median", "low", "high"))
    return f"{median} ({low} - {high}) {unit}"


def _panels(rows: Sequence[Row]) -> list[Panel]:
    worlds = sorted({row["world"] for row in rows})
    found = []
    for mode in dict.fromkeys(row["mode"] for row in rows):
        of_mode = [row for row in rows if row["mode"] == mode]
        lines = _lines(of_mode, lambda row: row["efficiency"] and row["efficiency"]["median"])
        if lines:
            ideal = Line(
                name="ideal", group="ideal", x=[worlds[0], worlds[-1]], y=[1.0, 1.0], color="#999999", dash="dash"
            )
            found.append(Panel(
                title=f"efficiency, {mode} scaling", lines=[ideal, *lines], x="ranks", y="", xlog=True,
                xticks=worlds,
            ))  # fmt: skip
        found.append(Panel(
            title=f"step, {mode} scaling", lines=_lines(of_mode, lambda row: 1e3 * row["median"]),
            x="ranks", y="ms", xlog=True, ylog=True, xticks=worlds,
        ))  # fmt: skip
    return found


def _lines(rows: Sequence[Row], value: Any) -> list[Line]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        if value(row) is not None:
            found.setdefault(row["variant"], []).append(row)
    return [
        Line(
            name=name, group=name, x=[row["world"] for row in of_name],
            y=[value(row) for row in of_name], color=COLORS[number % len(COLORS)], mark="circle",
            text=[f"{row['world']} ranks: {format_seconds(row['median'])}" for row in of_name],
        )
        for number, (name, of_name) in enumerate(found.items())
    ]  # fmt: skip
