"""The table of what messages take, and a page with their curves. No torch here."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.bench.comm_links import links_of
from samestep.bench.document import Document
from samestep.ui.chart import COLORS, Line, Panel, chart
from samestep.ui.page import write_page

COLUMNS = ("operation", "ranks", "size", "time", "95 % range", "bus bandwidth")
LINK_COLUMNS = ("operation", "ranks", "latency", "bandwidth")


def shown_size(size: float) -> str:
    """Bytes as a person says them."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


def shown_time(seconds: float) -> str:
    """Seconds as a person says them."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def cells(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Of the table of all messages."""
    return [
        (
            row["operation"],
            str(row["world"]),
            shown_size(row["bytes"]),
            shown_time(row["median"]),
            f"{shown_time(row['low'])} - {shown_time(row['high'])}",
            f"{shown_size(row['bus_bytes'])}/s",
        )
        for row in rows
    ]


def link_cells(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Of the table of lines through these times."""
    return [
        (
            operation,
            str(world),
            "-" if link is None else shown_time(link.latency),
            "-" if link is None else f"{shown_size(link.bandwidth)}/s",
        )
        for (operation, world), link in links_of(rows).items()
    ]


def heading(document: Document) -> str:
    """What was measured, in one line."""
    rounds = max(len(row["seconds"]) for row in document.rows)
    hosts = ", ".join(document.machine["hosts"])
    backends = ", ".join(sorted({row["backend"] for row in document.rows}))
    return f"{backends} on {hosts} ({document.machine['device']}); medians of {rounds} rounds"


def write_html(document: Document, path: Path) -> None:
    """Write a page with both tables and the curves.

    Args:
        document: What was measured.
        path: The file to write.
    """
    facts = {name: _text(value) for name, value in document.machine.items()}
    title = "What messages between ranks take"
    write_page(
        path,
        title,
        f"""<h1>{title}</h1>
<p>{html.escape(heading(document))}. Bus bandwidth: what each rank sends at least, comparable among operations.</p>
{chart(_panels(document.rows))}
<h2>A line through them</h2>
<p>A message of n bytes takes latency + n / bandwidth, as far as a line can say it.</p>
{_table(LINK_COLUMNS, link_cells(document.rows))}
<h2>All messages</h2>
{_table(COLUMNS, cells(document.rows))}""",
        facts,
    )


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(columns: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    def line(words: Sequence[str], tag: str) -> str:
        marks = ["", *['class="number"'] * (len(columns) - 1)]
        found = [
            f"<{tag} {mark}>{html.escape(word)}</{tag}>"
            for word, mark in zip(words, marks, strict=True)
        ]
        return f"<tr>{''.join(found)}</tr>"

    lines = "\n".join(line(row, "td") for row in body)
    return f"<table><thead>{line(columns, 'th')}</thead><tbody>{lines}</tbody></table>"


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
            text=[f"{shown_size(row['bytes'])}: {shown_time(row['median'])}" for row in found],
        )
        for number, (name, found) in enumerate(kinds.items())
    ]  # fmt: skip
