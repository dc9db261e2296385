"""Rank-aware logging: rank 0 speaks for the run, every rank has its own file.

Every line also goes to the standard logger `samestep`, so a logging config, a custom handler or
pytest's caplog get what the terminal shows:

    logging.getLogger("samestep").setLevel(logging.WARNING)
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

LOGGER = logging.getLogger("samestep")
# Without a NullHandler, Python would print warnings a second time where nobody configured logging.
LOGGER.addHandler(logging.NullHandler())
if LOGGER.level == logging.NOTSET:  # else it was configured before samestep was imported
    LOGGER.setLevel(logging.INFO)


class _Terminal(logging.Handler):
    """Writes to whatever stderr is now: a live progress bar puts lines above itself.

    A launched rank's is a file, on a disk that may be full: its lines are lost, and no rank fails of it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            print(self.format(record), file=sys.stderr, flush=True)


class _File(logging.FileHandler):
    """A rank's file. On a full disk its lines are lost; logging would print a traceback for each."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):  # what could not be written before cannot be now
            super().close()


class RankLog:
    """Lines on the terminal, with `[Rank n]` where there are several, and in rank-N.log.

    Its terminal and its file are not handlers of the logger: two runs in one process share that,
    and must not write into each other's files.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._prefix = f"[Rank {rank}] " if world > 1 else ""
        self._terminal: logging.Handler | None = _Terminal()
        self._file: logging.FileHandler | None = None
        self._told: set[str] = set()

    @property
    def among_others(self) -> bool:
        """Return whether other ranks may print to the same terminal."""
        return bool(self._prefix)

    def main(self, message: str) -> None:
        """A line for the run: rank 0's terminal, every rank's file."""
        self._write(logging.INFO, message, shown=self._rank == 0)

    def once(self, about: str, message: str) -> None:
        """The same, but only the first of all lines about one thing."""
        if about not in self._told:
            self._told.add(about)
            self.main(message)

    def everyone(self, message: str) -> None:
        """A line that every rank shows."""
        self._write(logging.INFO, message, shown=True)

    def warn(self, message: str) -> None:
        """A warning, which every rank shows."""
        self._write(logging.WARNING, message, shown=True)

    def _write(self, level: int, message: str, shown: bool) -> None:
        if not LOGGER.isEnabledFor(level):
            return
        if self._file is not None:
            self._file.handle(self._record(level, message))
        if shown:
            record = self._record(level, self._prefix + message)
            if self._terminal is not None and not _is_shown_by_others(record):
                self._terminal.handle(record)
            # It propagates, or caplog and handlers of the root logger would not get it. What only
            # rank 0 shows does not come here on other ranks: each handler would repeat it.
            LOGGER.handle(record)

    def _record(self, level: int, message: str) -> logging.LogRecord:
        caller = sys._getframe(3)  # of main(), everyone() or warn()
        return LOGGER.makeRecord(
            LOGGER.name,
            level,
            caller.f_code.co_filename,
            caller.f_lineno,
            message,
            (),
            None,
            caller.f_code.co_name,
            {"rank": self._rank},
        )

    @property
    def stream(self) -> IO[str] | None:
        """The file that is written to, if there is one."""
        return None if self._file is None else self._file.stream

    def to_file(self, folder: Path, append: bool = False) -> None:
        """Also write to `rank-N.log` in the folder from here on."""
        folder.mkdir(parents=True, exist_ok=True)
        mode = "a" if append else "w"
        self._file = _File(folder / f"rank-{self._rank}.log", mode=mode)
        self._file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    def close(self) -> None:
        """Leave the terminal and close the file. Safe to call twice."""
        for handler in (self._terminal, self._file):
            if handler is not None:
                handler.close()
        self._terminal = self._file = None


def _is_shown_by_others(record: logging.LogRecord) -> bool:
    """Return whether a handler of the user's, such as logging.basicConfig's, prints it to the terminal.

    Then ours must not: every line would be there twice.
    """
    terminals = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
    for handler in _handlers():
        console = getattr(handler, "console", None)  # rich's
        stream = getattr(handler, "stream", None) or getattr(console, "file", None)
        if stream is not None and stream in terminals and handler.level <= record.levelno:
            return True
    return False


def _handlers() -> Iterator[logging.Handler]:
    """Yield all that get what goes to our logger."""
    logger: logging.Logger | None = LOGGER
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


class KeptLog(RankLog):
    """Keeps its lines instead of showing them, of runs by the dozen that only measure."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.lines: list[str] = []

    def main(self, message: str) -> None:
        self.lines.append(message)

    def everyone(self, message: str) -> None:
        self.lines.append(message)

    def warn(self, message: str) -> None:
        self.lines.append(message)
