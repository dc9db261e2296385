"""Presents times of messages. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samestep.bench.document import Document
from samestep.bench.presentation import Presentation, Table
from samestep.bench.statistics import Link, fit_link
from samestep.report.chart import COLORS, Line, Panel
from samestep.report.format import format_bytes, format_seconds


def links_of(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], Link | None]:
    """Return, per operation and world size, the line through its times."""
    kinds: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds.setdefault((row["operation"], row["world"]), []).append(row)
    return {
        kind: fit_link([row["bytes"] for row in found], [row["median"] for row in found])
        for kind, found in kinds.items()
    }


COLUMNS = ("operation", "ranks", "size", "time", "95 % range", "bus bandwidth")
LINK_COLUMNS = ("operation", "ranks", "latency", "bandwidth")


def cells(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of the table of all messages."""
    return [
        (
            row["operation"],
            str(row["world"]),
            format_bytes(row["bytes"]),
            format_seconds(row["median"]),
            f"{format_seconds(row['low'])} - {format_seconds(row['high'])}",
            f"{format_bytes(row['bus_bytes'])}/s",
        )
        for row in rows
    ]


def link_cells(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the cells of the table of lines through these times."""
    return [
        (
            operation,
            str(world),
            "-" if link is None else format_seconds(link.latency),
            "-" if link is None else f"{format_bytes(link.bandwidth)}/s",
        )
        for (operation, world), link in links_of(rows).items()
    ]


def heading(document: Document) -> str:
    """Return what was measured, in one line."""
    rounds = max(len(row["seconds"]) for row in document.rows)
    hosts = ", ".join(document.machine["hosts"])
    backends = ", ".join(sorted({row["backend"] for row in document.rows}))
    return f"{backends} on {hosts} ({document.machine['device']}); medians of {rounds} rounds"


def present(document: Document) -> Presentation:
    """Return how it is shown: the curves, the lines through them, and all messages."""
    rows = document.rows
    return Presentation(
        title="What messages between ranks take",
        heading=heading(document),
        panels=_panels(rows),
        tables=[
            Table(
                "All messages",
                COLUMNS,
                cells(rows),
                "Bus bandwidth: what each rank sends at least, comparable among operations.",
            ),
            Table(
                "A line through them",
                LINK_COLUMNS,
                link_cells(rows),
                "A message of n bytes takes latency + n / bandwidth, as far as a line can say it.",
            ),
        ],
    )


def _panels(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    return [
        Panel(
            title=f"{title}, {world} ranks",
            lines=_lines([row for row in rows if row["world"] == world], key, scale),
            x="KB of a message", y=unit, xlog=True, ylog=True,
            xticks=sorted({row["bytes"] / 1024 for row in rows})[::3],
        )
        for world in sorted({row["world"] for row in rows})
        for title, key, scale, unit in (
            ("time", "median", 1e3, "ms"),
            ("bus bandwidth", "bus_bytes", 1 / 2**30, "GB/s"),
        )
    ]  # fmt: skip


def _lines(rows: Sequence[Mapping[str, Any]], key: str, scale: float) -> list[Line]:
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(row["operation"], []).append(row)
    return [
        Line(
            name=name, group=name, x=[row["bytes"] / 1024 for row in found],
            y=[scale * row[key] for row in found], color=COLORS[number % len(COLORS)],
            mark="circle",
            text=[f"{format_bytes(row['bytes'])}: {format_seconds(row['median'])}" for row in found],
        )
        for number, (name, found) in enumerate(kinds.items())
    ]  # fmt: skip
