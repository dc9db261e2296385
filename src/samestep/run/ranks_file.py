"""Writes a run's `ranks.json`: what each rank does, and the world size of every start.

For whoever looks at a run that trains. Written by rank 0, whose thread waits for a slow disk in place of the run.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from samestep.checkpoint.files import write_whole
from samestep.errors import TextError
from samestep.parsing.json_text import read_json
from samestep.run.open_run import Opened
from samestep.run.run_dir import RANKS
from samestep.run_setup import RunSetup

_SECONDS_BETWEEN = 5.0
_SECONDS_TO_END = 10.0


class RanksFile:
    """Writes the file every few seconds, from the first step to the end of the run."""

    def __init__(self, setup: RunSetup, opened: Opened) -> None:
        self._setup, self._context, self._opened = setup, setup.context, opened
        self._path = setup.config.run_path / RANKS
        self._starts: list[Any] = []
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._written = False

    def begin(self, step: int) -> None:
        """Start to write, if this process writes the run's files."""
        if not self._opened.owns_directory:
            return
        self._starts = [*self._earlier_starts(step), {"step": step, "world": self._context.world, "time": time.time()}]
        self._thread = threading.Thread(target=self._live, name="samestep-ranks", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Write a last time, and stop. Safe to call twice."""
        self._done.set()
        if self._thread is not None:
            self._thread.join(_SECONDS_TO_END)  # a disk that hangs does not hold up the run

    def _earlier_starts(self, step: int) -> list[Any]:
        """Return the starts of the run that is resumed, up to the step from which this one computes anew."""
        try:
            found = read_json(self._path)["starts"]
            return [start for start in found if start["step"] < step]
        except (TextError, KeyError, TypeError):
            return []  # the first start, or a file that somebody has changed

    def _live(self) -> None:
        ends = warned = False
        while not ends:
            ends = self._done.wait(_SECONDS_BETWEEN) if self._written else False
            try:
                self._write()
            except OSError as error:  # a full disk, most often: the run itself says what is lost
                if not warned:
                    self._context.log.warn(f"{self._path} cannot be written: {error}")
                warned = True
            self._written = True

    def _write(self) -> None:
        lanes = self._setup.assignment.by_rank
        ranks = [
            {
                "rank": beat.rank, "host": beat.host, "step": beat.step, "phase": beat.phase,
                "seconds": round(beat.seconds, 1), "beat": beat.time, "lanes": list(lanes[beat.rank]),
            }
            for beat in self._context.beats()
        ]  # fmt: skip
        document = {"written": time.time(), "starts": self._starts, "ranks": ranks}
        # After a crash of the machine nobody asks what its ranks did.
        write_whole(self._path, json.dumps(document), synced=False)
