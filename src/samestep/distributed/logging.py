"""Rank-aware logging: rank 0 speaks for the run, every rank keeps a file of its own."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import IO


class _Terminal(logging.Handler):
    """Writes to whatever stderr is now: a live progress bar puts lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


class RankLog:
    """Lines on the terminal, with `[Rank n]` where there are several, and in rank-N.log."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._file: logging.FileHandler | None = None
        # A logger of its own: two runs in one process must not write each other's lines.
        self._logger = logging.Logger("samestep", logging.INFO)
        prefix = f"[Rank {rank}] " if world > 1 else ""
        self._console = _Terminal()
        self._console.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
        self._console.addFilter(self._speaks)
        self._logger.addHandler(self._console)

    def _speaks(self, record: logging.LogRecord) -> bool:
        return self._rank == 0 or getattr(record, "everyone", record.levelno > logging.INFO)

    def main(self, message: str) -> None:
        """A line for the run: rank 0's terminal, every rank's file."""
        self._logger.info(message)

    def everyone(self, message: str) -> None:
        """A line that every rank shows."""
        self._logger.info(message, extra={"everyone": True})

    def warn(self, message: str) -> None:
        self._logger.warning(message)

    @property
    def stream(self) -> IO[str] | None:
        """The file that is written to, if there is one."""
        return None if self._file is None else self._file.stream

    def to_file(self, folder: Path, append: bool = False) -> None:
        """From here on also write to `rank-N.log` in the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        mode = "a" if append else "w"
        self._file = logging.FileHandler(folder / f"rank-{self._rank}.log", mode=mode)
        self._file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._logger.addHandler(self._file)

    def close(self) -> None:
        self._logger.removeHandler(self._console)
        if self._file is not None:
            self._logger.removeHandler(self._file)
            self._file.close()
            self._file = None
