"""A run's directory: locked while a run is in it, and nothing in it is ever overwritten."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import IO

from samestep.checkpoint.files import Files
from samestep.errors import RunFolderError

try:
    import fcntl
except ImportError:  # not on Windows, where two runs in one directory are not noticed
    fcntl = None  # type: ignore[assignment]

_LOCK = "run.lock"
_STAYS = ("earlier", "verify", "launch", _LOCK)
"""What belongs to the directory and not to one run in it."""


class RunFolder:
    """The directory of one run, on the rank that writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / _LOCK).open("a+", encoding="utf-8")
        except OSError as error:
            raise RunFolderError(
                f"run directory {path} cannot be written: {error.strerror or error}. Set run_dir "
                "to a directory that you can write to"
            ) from None
        _take(self._lock, path)

    def set_aside(self) -> Path | None:
        """Move what an earlier run left to `earlier/N`; None if there was none."""
        left = [path for path in self.path.glob("*") if path.name not in _STAYS]
        if not (self.path / "metrics.jsonl").exists():
            return None
        number = 1
        while (self.path / "earlier" / str(number)).exists():
            number += 1
        aside = self.path / "earlier" / str(number)
        aside.mkdir(parents=True)
        for path in left:
            shutil.move(str(path), str(aside / path.name))
        return aside

    def forget_after(self, step: int) -> None:
        """Take out of metrics.jsonl what came after a checkpoint: it will come again."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        partial = path.with_name(path.name + ".partial")
        with path.open(encoding="utf-8") as lines, partial.open("w", encoding="utf-8") as kept:
            kept.writelines(line for line in lines if _step_of(line) < step)
        files = Files()
        files.sync(partial)
        files.replace(partial, path)

    def close(self) -> None:
        """Let others use the directory. Safe to call twice."""
        self._lock.close()


def _step_of(line: str) -> float:
    """The step of a line; infinity for one that was cut off in the middle."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _take(lock: IO[str], path: Path) -> None:
    """Lock the directory: the kernel lets go of it when this process ends, however it ends."""
    if fcntl is None:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise RunFolderError(
            f"run directory {path} is in use by {holder}. Wait for that run to end, or set another "
            "name or run_dir"
        ) from None
    except OSError:
        return  # this file system has no locks: two runs in one directory are not noticed
    lock.seek(0)
    lock.truncate()
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    lock.write(f"process {os.getpid()} on {socket.gethostname()} since {when}\n")
    lock.flush()
