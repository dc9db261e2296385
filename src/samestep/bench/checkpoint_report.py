"""Presents times of saves and restores. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samestep.bench.document import Document
from samestep.bench.presentation import Presentation, Table
from samestep.report.format import format_bytes, format_seconds
from samestep.words import counted

Row = Mapping[str, Any]

COLUMNS = ("action", "ranks", "time", "95 % range", "size", "bandwidth")
_NAMES = {
    "torch.save": "torch.save (the control)",
    "pause": "training pauses for a save",
    "pause, asynchronous: false": "... with asynchronous: false",
    "save": "until it is on disk",
    "step": "a step",
    "step beside a save": "a step while a save is written",
}
_MOVE_BYTES = ("torch.save", "save", "restore", "pause, asynchronous: false")


def bandwidth(row: Row) -> float | None:
    """Bytes in a second; None for what moves none to or from the disk."""
    return row["bytes"] / row["median"] if row["action"] in _MOVE_BYTES else None


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of the table of everything that was timed."""
    return [
        (
            _name(row),
            str(row["world"]),
            format_seconds(row["median"]),
            f"{format_seconds(row['low'])} - {format_seconds(row['high'])}",
            format_bytes(row["bytes"]) if row["bytes"] else "-",
            "-" if (speed := bandwidth(row)) is None else f"{format_bytes(speed)}/s",
        )
        for row in rows
    ]


def _name(row: Row) -> str:
    if row["action"] == "restore":
        return f"restore, saved by {counted(row['saved_by'], 'rank')}"
    return _NAMES[row["action"]]


def verdict(rows: Sequence[Row]) -> str:
    """Return what a save costs at one number of ranks."""
    took = {row["action"]: row for row in rows if row["action"] != "restore"}
    pause, save, control = took["pause"], took["save"], took["torch.save"]
    restore = next(row for row in rows if row.get("saved_by") == row["world"])
    ratio, slower = pause["median"] / control["median"], _slower(took)
    return (
        f"On {counted(pause['world'], 'rank')}, a save of {format_bytes(save['bytes'])} pauses training for "
        f"{format_seconds(pause['median'])}, {ratio:.2g}x torch.save's {format_seconds(control['median'])}; it is on disk "
        f"after {format_seconds(save['median'])}, and restored in {format_seconds(restore['median'])}. A step takes "
        f"{slower:.2g}x as long while it is written."
    )


def _slower(took: Mapping[str, Row]) -> float:
    return float(took["step beside a save"]["median"] / took["step"]["median"])


def present(document: Document) -> Presentation:
    """Return how it is shown: everything that was timed."""
    machine, rows = document.machine, document.rows
    rounds = max(len(row["seconds"]) for row in rows)
    hosts = ", ".join(machine["hosts"])
    return Presentation(
        title="What saves and restores take",
        heading=f"{machine['task']} on {hosts} ({machine['device']}); medians of {rounds} rounds",
        panels=[],
        tables=[
            Table(
                "Saves and restores",
                COLUMNS,
                cells(rows),
                "Of the slowest rank. What was just written is restored from the memory of its host, not from the disk.",
            )
        ],
        verdicts=[
            verdict([row for row in rows if row["world"] == world]) for world in sorted({row["world"] for row in rows})
        ],
    )
