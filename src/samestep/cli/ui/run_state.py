"""A run in one line: its status, place, world sizes and the shape of its loss. No torch here."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.checkpoint.run_result import RESULT, read_result
from samestep.cli.show import status_of, text_of
from samestep.errors import CheckpointError, TextError
from samestep.parsing.files import open_regular
from samestep.parsing.json_text import parse_json, read_json
from samestep.report.curves.history import METRICS
from samestep.run.run_dir import RANKS

_SAMPLES = 32
"""Points of a sparkline."""
_BLOCK = 2048
"""Bytes that are read for each; a row has a few hundred."""
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
    """When it last wrote something."""

    @property
    def age(self) -> float:
        """Seconds since it last wrote something."""
        return time.time() - self.changed

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
    best = None if newest is None else document_of(newest).get("best")
    return best if isinstance(best, dict) else None


def starts_of(run: Path) -> list[Any]:
    """Return the first step, world size and time of every start of a run; empty if that is not known."""
    found = document_of(run / RANKS).get("starts")
    known = ("step", "world", "time")
    return [start for start in found if all(key in start for key in known)] if isinstance(found, list) else []


def document_of(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none."""
    try:
        value = read_json(path)
    except TextError:
        return {}
    return value if isinstance(value, dict) else {}


def _whole(path: Path, key: str) -> int | None:
    value = document_of(path).get(key)
    return value if isinstance(value, int) else None


def _changed(run: Path) -> float:
    times = []
    for name in (RESULT, METRICS, RANKS):
        try:
            times.append((run / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)


def sample_rows(path: Path) -> list[dict[str, Any]]:
    """Return rows from evenly spread places of a file of any length, and its last ones; empty if it cannot be read."""
    rows = []
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            for number in range(_SAMPLES + 1):
                file.seek(max(0, (size - _BLOCK) * number // _SAMPLES))
                block = file.read(_BLOCK).decode("utf-8", "replace")
                lines = block.split("\n")
                # A block begins inside of a line, unless it is the file's first.
                rows += _rows(lines if number == 0 else lines[1:], every=number == _SAMPLES)
    except (OSError, TextError):
        return []
    return sorted({row["step"]: row for row in rows}.values(), key=lambda row: row["step"])


def _rows(lines: Sequence[str], every: bool) -> list[dict[str, Any]]:
    found = []
    for line in lines:
        try:
            row = parse_json(line)
        except TextError:
            continue  # half a line
        if isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("loss"), float):
            found.append(row)
            if not every:
                break
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
