"""A run's directory: locked while a run uses it, and nothing in it is ever overwritten."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from samestep.checkpoint.files import Files
from samestep.config import Config, load_config
from samestep.errors import CheckpointError, RunDirError

_LOCK = "run.lock"
_STARTED = "started.json"
_OURS = (
    "checkpoints", "metrics.jsonl", "model.safetensors", "config.json", "plan.json", "logs",
    "tensorboard", "export", "average.safetensors", "lr-find.json", "lr-find.png", "lr-find.html",
    _STARTED,
)  # fmt: skip
"""What one run writes there; any other file is not ours to move."""


def config_of(run: Path, overrides: Sequence[str] = ()) -> Config:
    """The config that a run was started with.

    Args:
        run: the run's directory.
        overrides: `section.key=value` texts applied on top of it.

    Raises:
        CheckpointError: if `run` is not a run's directory.
    """
    if not (run / "config.json").is_file():
        raise CheckpointError(f"{run} is not a run's directory: it holds no config.json")
    return load_config(run / "config.json", overrides)


class RunDir:
    """The directory of one run, created if missing and locked, on the rank that writes to it.

    Args:
        path: the directory.

    Raises:
        RunDirError: if it cannot be written, or another run (named in the message) is using it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / _LOCK).open("a").close()
        except OSError as error:
            raise RunDirError(
                f"run directory {path} cannot be written: {error.strerror or error}. Set run_dir "
                "to a directory that you can write to"
            ) from None
        # A soft lock would outlive a killed process: without flock there is no lock at all.
        self._lock = FileLock(path / _LOCK, fallback_to_soft=False, thread_local=False)
        self._acquire_lock()

    def _acquire_lock(self) -> None:
        """Lock the directory: the kernel releases it when this process ends, however it ends.

        filelock closes the file in forked loader workers, which may outlive this process.
        """
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            holder = (self.path / _LOCK).read_text(encoding="utf-8").strip() or "another process"
            raise RunDirError(
                f"run directory {self.path} is in use by {holder}. Wait for that run to end, or "
                "set another name or run_dir"
            ) from None
        except OSError:
            return  # this file system has no locks: two runs in one directory are not detected
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"process {os.getpid()} on {socket.gethostname()} since {since}\n"
        (self.path / _LOCK).write_text(holder, encoding="utf-8")

    def set_aside(self) -> Path | None:
        """Move the files of an earlier run to `earlier/N`; returns that path, None if there are none."""
        leftover = [self.path / name for name in _OURS if (self.path / name).exists()]
        if not any(path.name in ("metrics.jsonl", "checkpoints") for path in leftover):
            return None
        number = 1
        while (self.path / "earlier" / str(number)).exists():
            number += 1
        aside = self.path / "earlier" / str(number)
        aside.mkdir(parents=True)
        for path in leftover:
            shutil.move(str(path), str(aside / path.name))
        return aside

    def forget_after(self, step: int) -> None:
        """Remove the rows from `step` on from metrics.jsonl: the resumed run writes them again."""
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
        """The ids of the launch that started the run in this directory; empty if it had none."""
        try:
            launch = json.loads((self.path / _STARTED).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # missing, or truncated by a crash of the machine
            return []
        return [i for i in launch if isinstance(i, str)] if isinstance(launch, list) else []

    def begin(self, launch: Sequence[str]) -> None:
        """Record the ids of the launch that starts a run here: its restarts resume that run."""
        partial = self.path / (_STARTED + ".partial")
        partial.write_text(json.dumps(list(launch)), encoding="utf-8")
        partial.replace(self.path / _STARTED)

    def close(self) -> None:
        """Release the lock, so that another run can use the directory. Safe to call twice."""
        self._lock.release()


def _step_of(line: str) -> float:
    """The step of a line; infinity for a truncated line."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
