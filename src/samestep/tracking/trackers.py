"""Sends measurements to trackers: one contract, rank 0 only."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
from torch import Tensor

from samestep.checkpoint.manifest import PARTIAL
from samestep.checkpoint.ownership import reraise_os_errors
from samestep.config import Config
from samestep.errors import RunDirError, TaskError
from samestep.parsing.json_text import read_json_lines
from samestep.tracking.configured_trackers import named_trackers
from samestep.tracking.contract import Tracker, figures_in, without_figures
from samestep.tracking.guard import GuardedTracker


class JsonLines(Tracker):
    """One JSON object a line; floats in full, so that they read back exactly."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # What a resumed run had written up to its checkpoint stays.
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        texts = without_figures(row)
        if texts.keys() == {"step"} != row.keys():
            return
        with self._named_errors():
            self._file.write(json.dumps(texts) + "\n")

    def flush(self) -> None:
        with self._named_errors():
            self._file.flush()

    def close(self) -> None:
        with self._named_errors():
            self._file.close()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunDirError(
                f"{self._path} could not be written: {error.strerror or error}. Free space or fix "
                "the disk, and start the run again to resume from its newest checkpoint"
            ) from error


class FigureFiles(Tracker):
    """Figures as `NAME-STEP.png` in one folder, which the first of them makes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, row: dict[str, Any]) -> None:
        for name, figure in figures_in(row).items():
            safe = re.sub(r"[^\w.-]+", "-", name)
            path = self._folder / f"{safe}-{row['step']:08d}.png"
            try:
                self._folder.mkdir(exist_ok=True)
                figure.savefig(path)
            except OSError as error:
                raise RunDirError(f"{path} could not be written: {error}") from error


class RecentRows(Tracker):
    """Keeps the rows that may not be on rank 0's disk yet, in case it is lost.

    Rank 0 has flushed what all ranks flushed before the last step but one: without that it would
    not have taken part in the last one.
    """

    def __init__(self) -> None:
        self._unflushed: list[dict[str, Any]] = []
        self._flushed: list[dict[str, Any]] = []
        self._flushed_before: list[dict[str, Any]] = []

    def write(self, row: dict[str, Any]) -> None:
        self._unflushed.append(without_figures(row))

    def flush(self) -> None:
        self._flushed += self._unflushed
        self._unflushed = []

    def reached(self) -> None:
        """Another step is over."""
        self._flushed_before, self._flushed = self._flushed, []

    def kept(self) -> list[dict[str, Any]]:
        return [*self._flushed_before, *self._flushed, *self._unflushed]


class Trackers(Tracker):
    """All trackers of a run; on ranks other than 0, none."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def write(self, row: dict[str, Any]) -> None:
        if self._trackers:  # other ranks need not wait for their devices
            row = {name: _plain(name, value) for name, value in row.items()}
        for tracker in self._trackers:
            tracker.write(row)

    def flush(self) -> None:
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def warn_with(self, warn: Callable[[str], None]) -> None:
        """Set who gets a warning if a tracker fails."""
        for tracker in self._trackers:
            if isinstance(tracker, GuardedTracker):
                tracker.warn = warn

    def log_files(self, folder: Path, patterns: Sequence[str]) -> None:
        """Hand files of the run's directory to the trackers that take some.

        Args:
            patterns: Which of its files; what a directory holds counts if the pattern names it.
        """
        if self._trackers and patterns:
            for path in _files_of(folder, patterns):
                for tracker in self._trackers:
                    tracker.log_file(path, path.relative_to(folder).as_posix())


def _files_of(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files that patterns name, each once; none of a checkpoint that is being written."""
    found: set[Path] = set()
    for pattern in patterns:
        for path in folder.glob(pattern):
            found.update(path.rglob("*") if path.is_dir() else [path])
    inside = [path for path in found if path.is_file() and PARTIAL not in path.as_posix()]
    return sorted(inside)


_PLAIN = (bool, int, float, str, NoneType)
_PLAIN_TYPES = frozenset(_PLAIN)


def _plain(name: str, value: Any) -> Any:
    """Return a value as all trackers know it."""
    if type(value) in _PLAIN_TYPES:  # first, since every step writes some
        return value
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(name, item) for key, item in value.items()}
    if isinstance(value, _PLAIN) or figures_in({name: value}):
        return value
    raise TaskError(
        f"{name} is a {type(value).__name__}: trackers take numbers, text, tensors, lists and "
        "mappings of them, and matplotlib figures"
    )


def open_trackers(
    config: Config, folder: Path, is_main: bool, start: int = 0, rows: Sequence[dict[str, Any]] = ()
) -> Trackers:
    """Return the config's trackers on rank 0; none on the others.

    Args:
        rows: Rows before `start` that the metrics file may lack.
    """
    if not is_main:
        return Trackers([])
    path = folder / "metrics.jsonl"
    with reraise_os_errors(folder):
        trackers: list[Tracker] = [JsonLines(path), FigureFiles(folder / "figures")]
        trackers += named_trackers(config, folder, path, start)
        opened = Trackers(trackers)
        for row in missing_rows(path, rows):
            opened.write(row)
        opened.flush()
    return opened


def missing_rows(path: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return which of these rows a metrics file lacks: rank 0 was lost before it had written them.

    Args:
        path: The file, of whole lines.
        rows: In the order in which they were written on another rank, whose times are others.
    """
    if not rows or not path.exists():
        return list(rows)
    first = min(row["step"] for row in rows)
    written: Counter[tuple[int, frozenset[str]]] = Counter()
    for found in read_json_lines(path):
        step = None if found is None else found.get("step")
        if found is not None and isinstance(step, int) and step >= first:
            written[step, frozenset(found)] += 1
    missing = []
    for row in rows:
        key = row["step"], frozenset(row)
        written[key] -= 1
        if written[key] < 0:
            missing.append(row)
    return missing
