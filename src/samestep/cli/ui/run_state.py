"""A run in one line: its status, place, world sizes and the shape of its loss. No torch here."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from samestep.checkpoint.run_result import RESULT, read_result
from samestep.cli.show import status_of, text_of
from samestep.errors import CheckpointError, TextError
from samestep.parsing.files import open_regular
from samestep.parsing.json_text import parse_json, read_object
from samestep.report.curves.history import METRICS
from samestep.run.run_dir import RANKS

_SAMPLES = 32
"""Points of a sparkline."""
_BLOCKS = (2048, 32768, 524288)
"""Bytes that are read for each, if fewer hold no whole row: most have a few hundred."""
_SILENT = 60.0
"""Seconds after which a run that trains is said to be silent."""
_WIDTH, _HEIGHT = 110, 22


@dataclass(frozen=True)
class RunState:
    """One run as it was when it was looked at."""

    path: Path
    status: str
    reason: str = ""
    step: int = 0
    total: int | None = None
    world: int = 1
    starts: Sequence[Any] = ()
    """The first step and the world size of every start."""
    loss: float | None = None
    best: str = ""
    losses: Sequence[float] = ()
    """A few, evenly spread over the run."""
    changed: float = 0.0
    """When it last wrote numbers, or its result."""

    @property
    def age(self) -> float:
        """Seconds since it last wrote numbers, or its result."""
        return time.time() - self.changed

    @property
    def is_silent(self) -> bool:
        """Return whether its files say that it trains, though it has written nothing for long."""
        return self.status == "running" and self.age > _SILENT

    @property
    def worlds(self) -> str:
        """The world size, and those before it."""
        return " → ".join(str(start["world"]) for start in self.starts) or str(self.world)


def read_state(run: Path) -> RunState:
    """Return the state of a run; what cannot be read is left out, and the reason says why."""
    try:
        result = read_result(run)
    except CheckpointError as error:
        return RunState(run, "unreadable", str(error))
    if result is None:
        return RunState(run, "gone", f"{run / RESULT} is not there any more")
    rows = sample_rows(run / METRICS)
    losses = [row["loss"] for row in rows if isinstance(row.get("loss"), float)]
    last = max((row["step"] + 1 for row in rows if isinstance(row.get("step"), int)), default=0)
    status, training = status_of(run, result), result.status == "running"
    best = (_newest_best(run) if training else None) or result.best or {}
    return RunState(
        run, status, result.reason or "", last if training else result.steps, _whole(run / "plan.json", "steps"),
        result.world, starts_of(run), (losses[-1] if losses else None) if training else result.loss,
        f"{best.get('metric')} {text_of(best.get('value'))}" if best else "", losses, _changed(run),
    )  # fmt: skip


def _newest_best(run: Path) -> Mapping[str, Any] | None:
    """Return the best evaluation by the newest checkpoint: a run that trains has no result yet."""
    newest = max((run / "checkpoints").glob("step-*/manifest.json"), default=None)
    best = None if newest is None else read_object(newest).get("best")
    return best if isinstance(best, dict) else None


def starts_of(run: Path) -> list[Any]:
    """Return the first step and the world size of every start of a run; empty if that is not known."""
    found = read_object(run / RANKS).get("starts")
    starts = [start for start in found if isinstance(start, dict)] if isinstance(found, list) else []
    return [start for start in starts if all(isinstance(start.get(key), int) for key in ("step", "world"))]


def _whole(path: Path, key: str) -> int | None:
    value = read_object(path).get(key)
    return value if isinstance(value, int) else None


def _changed(run: Path) -> float:
    times = []
    # Not of ranks.json: its thread writes on while a run hangs.
    for name in (RESULT, METRICS):
        try:
            times.append((run / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)


def sample_rows(path: Path) -> list[dict[str, Any]]:
    """Return rows from evenly spread places of a file of any length, and its last ones; empty if it cannot be read."""
    rows: dict[int, dict[str, Any]] = {}
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            for number in range(_SAMPLES + 1):
                for block in _BLOCKS:
                    found = _rows_at(file, (size - block) * number // _SAMPLES, block)
                    if found or block >= size:
                        break
                rows |= found if number == _SAMPLES else dict(list(found.items())[:1])
    except OSError:
        return []
    return [rows[step] for step in sorted(rows)]


def _rows_at(file: BinaryIO, start: int, size: int) -> dict[int, dict[str, Any]]:
    """Return the rows of steps in a part of a file, by step."""
    file.seek(max(0, start))
    lines = file.read(size).decode("utf-8", "replace").split("\n")
    found = {}
    for line in lines[start > 0 :]:  # a part begins inside of a line
        try:
            row = parse_json(line)
        except TextError:
            continue  # half a line
        if isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("loss"), float):
            found[row["step"]] = row
    return found


def sparkline_svg(values: Sequence[float]) -> str:
    """Return a curve as a small picture, without axes."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    points = " ".join(
        f"{_WIDTH * at / (len(finite) - 1):.1f},{2 + (_HEIGHT - 4) * (high - value) / span:.1f}"
        for at, value in enumerate(finite)
    )
    return f'<svg class="spark" width="{_WIDTH}" height="{_HEIGHT}"><polyline points="{points}"/></svg>'
