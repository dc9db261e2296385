"""Keeps a tracker's trouble away from the run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.tracking.contract import TrackedRun, Tracker, figures_in


class GuardedTracker(Tracker):
    """A tracker whose errors become one warning, and which changes no random number of the run.

    It is started by its first rows: a run that is refused before it trains leaves no trace there.
    After an error it gets no more calls: each may wait for a network until it gives up.
    """

    def __init__(self, key: str, tracker: Tracker, run: TrackedRun) -> None:
        self._key, self._tracker, self._run = key, tracker, run
        self._rows: list[dict[str, Any]] = []
        self._started = self._failed = False
        self.warn: Callable[[str], None] | None = None
        """Gets the warning; until it is there, the warning waits."""
        self._warning: str | None = None

    def write(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if figures_in(row):  # who made them may change them before the next flush
            self._send()

    def log_file(self, path: Path, name: str) -> None:
        self._send()
        if self._started:
            self._call(lambda: self._tracker.log_file(path, name))

    def flush(self) -> None:
        self._send()
        if self._started:
            self._call(self._tracker.flush)

    def close(self) -> None:
        self._send()
        if self._started:
            self._call(self._tracker.close)

    def _send(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self._call(lambda: self._write_all(rows))

    def _write_all(self, rows: list[dict[str, Any]]) -> None:
        if not self._started:
            self._tracker.start(self._run)
            self._started = True
        for row in rows:
            self._tracker.write(row)

    def _call(self, call: Callable[[], None]) -> None:
        if not self._failed:
            with _same_random_numbers():
                try:
                    call()
                except Exception as error:  # whatever a library or a network makes of it
                    self._failed = True
                    first = (str(error).strip() or "no message").splitlines()[0]
                    self._warning = (
                        f"{self._key} failed and gets nothing more of this run: "
                        f"{type(error).__name__}: {first}. The training continues; metrics.jsonl has "
                        "all measurements"
                    )
        self._report()

    def _report(self) -> None:
        if self.warn is not None and self._warning is not None:
            warning, self._warning = self._warning, None
            self.warn(warning)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Only rank 0 calls trackers: what they draw must not set it apart from the others."""
    python, numpy = random.getstate(), np.random.get_state()
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torch_state)
