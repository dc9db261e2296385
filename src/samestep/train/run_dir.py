"""A run's directory: locked while a run is in it, and nothing in it is ever overwritten."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from samestep.checkpoint.files import Files
from samestep.config import Config, load_config
from samestep.errors import CheckpointError, RunDirError

try:
    import fcntl
except ImportError:  # not on Windows, where two runs in one directory are not noticed
    fcntl = None  # type: ignore[assignment]

_LOCK = "run.lock"
_STARTED = "started.json"
_OURS = (
    "checkpoints", "metrics.jsonl", "model.safetensors", "config.json", "plan.json", "logs",
    "tensorboard", "export", "average.safetensors", "lr-find.json", "lr-find.png", "lr-find.html",
    _STARTED,
)  # fmt: skip
"""What one run puts there; whatever else is there is not ours to move."""


def config_of(run: Path, overrides: Sequence[str] = ()) -> Config:
    """The config that a run was started with, with overrides."""
    if not (run / "config.json").is_file():
        raise CheckpointError(f"{run} is not a run's directory: it holds no config.json")
    return load_config(run / "config.json", overrides)


class RunDir:
    """The directory of one run, on the rank that writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / _LOCK).open("a+", encoding="utf-8")
        except OSError as error:
            raise RunDirError(
                f"run directory {path} cannot be written: {error.strerror or error}. Set run_dir "
                "to a directory that you can write to"
            ) from None
        _take(self._lock, path)
        # A forked loader process has the lock as well, and may outlive us: it lets go at once.
        held = weakref.ref(self._lock)
        os.register_at_fork(after_in_child=lambda: _close(held()))

    def set_aside(self) -> Path | None:
        """Move what an earlier run left to `earlier/N`; None if there was none."""
        left = [self.path / name for name in _OURS if (self.path / name).exists()]
        if not any(path.name in ("metrics.jsonl", "checkpoints") for path in left):
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
            kept.writelines(line.rstrip("\n") + "\n" for line in lines if _step_of(line) < step)
        files = Files()
        files.sync(partial)
        files.replace(partial, path)

    def started_by(self) -> list[str]:
        """The names of the launch that began the run that is here; none if it had none."""
        try:
            said = json.loads((self.path / _STARTED).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there, or cut off by a crash of the machine
            return []
        return [name for name in said if isinstance(name, str)] if isinstance(said, list) else []

    def begin(self, launch: Sequence[str]) -> None:
        """Say which launch begins a run here: its restarts then go on, and do not begin anew."""
        partial = self.path / (_STARTED + ".partial")
        partial.write_text(json.dumps(list(launch)), encoding="utf-8")
        partial.replace(self.path / _STARTED)

    def close(self) -> None:
        """Let others use the directory. Safe to call twice."""
        if fcntl is not None and not self._lock.closed:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # also where a process we started has it open
        self._lock.close()


def _close(lock: IO[str] | None) -> None:
    if lock is not None:
        lock.close()


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
        raise RunDirError(
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
