"""Presents what a training's memory consists of. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samestep.bench.document import Document
from samestep.bench.presentation import Presentation, Table
from samestep.report.chart import COLORS, Line, Panel
from samestep.report.format import format_bytes
from samestep.words import counted

Row = Mapping[str, Any]

COLUMNS = ("part", "ranks", "lanes a rank", "measured", "range")
LEAK_COLUMNS = ("rank", "host", "ranks", "memory", "bytes a step", "95 % range", "steps", "leaks")


def part_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of the table of parts."""
    return [
        (
            row["part"],
            str(row["world"]),
            str(row["lanes_per_rank"]),
            _size(row["measured_bytes"]),
            f"{_size(row['low'])} - {_size(row['high'])}",
        )
        for row in rows
    ]


def leak_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of the table of what grows."""
    return [
        (
            str(leak["rank"]),
            leak["host"],
            str(row["world"]),
            leak["memory"],
            f"{leak['slope_bytes_per_step']:.0f}",
            f"{leak['low']:.0f} - {leak['high']:.0f}",
            str(leak["steps"]),
            "yes" if leak["leaks"] else "no",
        )
        for row in rows
        for leak in (row["leak"],)
    ]


def verdicts(parts: Sequence[Row], leaks: Sequence[Row]) -> list[str]:
    """Return what follows: what lanes cost, and which rank leaks."""
    return [*_accumulation(parts), *_leaking(leaks)]


def _accumulation(parts: Sequence[Row]) -> list[str]:
    found = []
    totals = [row for row in parts if row["part"] == "total"]
    for world in sorted({row["world"] for row in totals}):
        here = sorted((row for row in totals if row["world"] == world), key=lambda row: row["lanes_per_rank"])
        first, last = here[0], here[-1]
        if first is not last:
            ratio = last["measured_bytes"] / first["measured_bytes"]
            found.append(
                f"On {counted(world, 'rank')}, {last['lanes_per_rank']} lanes a rank hold {ratio:.2f}x what "
                f"{first['lanes_per_rank']} hold ({_size(last['measured_bytes'])} against "
                f"{_size(first['measured_bytes'])}), with the same global batch."
            )
    return found


def _leaking(leaks: Sequence[Row]) -> list[str]:
    guilty = [
        f"LEAK: rank {leak['rank']} of {row['world']} on {leak['host']} (memory: {leak['memory']}) grows by "
        f"{_size(leak['slope_bytes_per_step'])} with every step (95 %: {_size(leak['low'])} to "
        f"{_size(leak['high'])}), over {leak['steps']} steps."
        for row in leaks
        for leak in (row["leak"],)
        if leak["leaks"]
    ]
    if guilty or not leaks:
        return guilty
    steps = leaks[0]["leak"]["steps"]
    return [f"No rank's memory grows with the steps, over {steps} steps."]


def heading(document: Document) -> str:
    """Return what was measured, in one line."""
    machine = document.machine
    hosts = ", ".join(machine["hosts"])
    return f"{machine['task']} on {hosts} ({machine['device']}); of the rank that holds most"


def present(document: Document) -> Presentation:
    """Return how it is shown: parts, what lanes cost, and leaks."""
    parts = [row for row in document.rows if "part" in row]
    leaks = [row for row in document.rows if "leak" in row]
    tables = [
        Table(
            "What is held",
            COLUMNS,
            part_cells(parts),
            "The total is what is held at most, at one moment of a step; the range is over steps and ranks. Exchange is "
            "all else that is held between steps.",
        )
    ]
    if leaks:
        note = "A line through what is held after each step: the least of each window of steps."
        tables.append(Table("What grows", LEAK_COLUMNS, leak_cells(leaks), note))
    return Presentation(
        title="What a training's memory consists of",
        heading=heading(document),
        panels=_panels(parts),
        tables=tables,
        verdicts=verdicts(parts, leaks),
    )


def _panels(parts: Sequence[Row]) -> list[Panel]:
    lanes = sorted({row["lanes_per_rank"] for row in parts})
    return [
        Panel(
            title=f"memory of a rank by lanes, {counted(world, 'rank')}", x="lanes a rank", y="MB",
            lines=_lines([row for row in parts if row["world"] == world]), xticks=lanes, zero=True,
        )
        for world in sorted({row["world"] for row in parts})
    ]  # fmt: skip


def _lines(parts: Sequence[Row]) -> list[Line]:
    found = []
    for number, name in enumerate(dict.fromkeys(row["part"] for row in parts)):
        rows = sorted((row for row in parts if row["part"] == name), key=lambda row: row["lanes_per_rank"])
        sizes = [row["measured_bytes"] for row in rows]
        found.append(
            Line(
                name=name, group=name, x=[row["lanes_per_rank"] for row in rows],
                y=[None if size is None else size / 2**20 for size in sizes],
                color=COLORS[number % len(COLORS)], mark="circle",
            )
        )  # fmt: skip
    return found


def _size(size: float | None) -> str:
    return "-" if size is None else format_bytes(size)
