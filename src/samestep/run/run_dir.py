"""A run's directory: locked while a run uses it, and nothing in it is ever overwritten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from samestep.checkpoint.directory_lock import DirectoryLock, is_gone
from samestep.checkpoint.files import replacing, write_whole
from samestep.checkpoint.ownership import claim, reraise_os_errors
from samestep.checkpoint.run_result import RESULT
from samestep.config import Config, load_config
from samestep.errors import CheckpointError, RunDirError, TextError
from samestep.parsing.files import is_file, read_lines
from samestep.parsing.json_text import parse_json, read_json
from samestep.run.origin import ORIGIN
from samestep.tracking.contract import TRACKER_IDS

_LOCK = "run.lock"
_STARTED = "started.json"
CONFIG = "config.json"
RANKS = "ranks.json"
_OURS = (
    "checkpoints", "metrics.jsonl", "model.safetensors", CONFIG, "plan.json", "logs",
    "tensorboard", "export", "average.safetensors", "tune-lr.json", "tune-lr.png", "tune-lr.html",
    _STARTED, ORIGIN, "metrics.csv", "wandb", TRACKER_IDS, RESULT, RANKS,
)  # fmt: skip
"""What one run writes there; any other file is not ours to move."""


def config_of(run: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config that a run was started with.

    Raises:
        CheckpointError: if `run` is not a run's directory.
    """
    if not is_file(run / CONFIG):
        raise CheckpointError(f"{run} is not a run's directory: it holds no config.json")
    return load_config(run / CONFIG, overrides)


def holder_of(run: Path) -> str | None:
    """Return which process began to use a run's directory last; None if that cannot be read."""
    try:
        return (run / _LOCK).read_text(encoding="utf-8")
    except OSError:
        return None


def was_killed(run: Path) -> bool:
    """Return whether the process that used a run's directory last is known to be gone.

    Without its lock: whoever tries that is in the way of a run that starts just then.
    """
    return is_gone(holder_of(run) or "")


class RunDir:
    """The directory of one run, created if missing and locked, on the rank that writes to it.

    Raises:
        RunDirError: if it holds files that are not ours, cannot be written, or another run (named
            in the message) is using it.
    """

    def __init__(self, path: Path) -> None:
        self.path = claim(path)
        _refuse_links(path)
        self._lock = DirectoryLock(
            path, _LOCK, f"run directory {path}", "Wait for that run to end, or set another name or run_dir"
        )

    def set_aside(self) -> Path | None:
        """Move the files of an earlier run to `earlier/N`; returns that path, None if there are none."""
        leftover = self._leftover()
        if not any(path.name in ("metrics.jsonl", "checkpoints") for path in leftover):
            return None
        return self._move_aside(leftover)

    def bring_back(self, aside: Path) -> None:
        """Undo `set_aside`; what this start has written meanwhile, such as its log, goes there."""
        with reraise_os_errors(self.path):
            if leftover := self._leftover():
                self._move_aside(leftover)
            for path in list(aside.iterdir()):
                shutil.move(str(path), str(self.path / path.name))
            aside.rmdir()

    def _leftover(self) -> list[Path]:
        return [self.path / name for name in _OURS if (self.path / name).exists()]

    def _move_aside(self, paths: Sequence[Path]) -> Path:
        number = 1
        while (self.path / "earlier" / str(number)).exists():
            number += 1
        aside = self.path / "earlier" / str(number)
        aside.mkdir(parents=True)
        for path in paths:
            shutil.move(str(path), str(aside / path.name))
        return aside

    def forget_after(self, step: int) -> None:
        """Remove the rows from `step` on from metrics.jsonl: the resumed run writes them again."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        with replacing(path) as partial, partial.open("x", encoding="utf-8") as kept:
            lines = (line.rstrip("\n") for line in read_lines(path))
            kept.writelines(f"{line}\n" for line in lines if _step_of(line) < step)

    def started_by(self) -> list[str]:
        """Return the ids of the launch that started the run in this directory; empty if it had none."""
        try:
            launch = read_json(self.path / _STARTED)
        except TextError:  # missing, or truncated by a crash of the machine
            return []
        return [i for i in launch if isinstance(i, str)] if isinstance(launch, list) else []

    def branched_from(self) -> str | None:
        """Return the `resume.checkpoint` of the run in this directory; None if that is not known."""
        try:
            found = read_json(self.path / CONFIG)["resume"]["checkpoint"]
        except (TextError, KeyError, TypeError):
            return None
        return found if isinstance(found, str) else None

    def begin(self, launch: Sequence[str]) -> None:
        """Record the ids of the launch that starts a run here: its restarts resume that run."""
        write_whole(self.path / _STARTED, json.dumps(list(launch)))

    def close(self) -> None:
        """Release the lock, so that another run can use the directory. Safe to call twice."""
        self._lock.release()


def _refuse_links(folder: Path) -> None:
    """Refuse files of a run that are links: what is written to them would be written elsewhere."""
    for name in (*_OURS, _LOCK):
        path = folder / name
        if path.is_symlink() and not path.is_dir():
            raise RunDirError(
                f"{path} is a link to {path.readlink()}, and a run would write there. Remove it, or set another "
                "name or run_dir"
            )


def _step_of(line: str) -> float:
    """Return the step of a line; infinity for a truncated line."""
    try:
        row = parse_json(line)
    except TextError:
        return float("inf")
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, (int, float)) else float("inf")
