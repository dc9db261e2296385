"""The checkpoints of a run: which there are, whether they are intact, and which one is meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.checkpoint.manifest import Manifest, verify_checkpoint
from samestep.errors import CheckpointError
from samestep.parsing.numbers import whole_number


@dataclass(frozen=True)
class FoundCheckpoint:
    """A directory that is a checkpoint, or looks like one."""

    folder: Path
    manifest: Manifest | None
    wrong: str = ""
    """Why it cannot be used; empty if it can."""

    @property
    def step(self) -> int:
        """The number of steps done when it was written, from its name."""
        return _step_of(self.folder) or 0

    @property
    def size(self) -> int:
        """Bytes on disk; 0 if they cannot be counted, as when it is being removed."""
        try:
            return sum(path.stat().st_size for path in self.folder.iterdir() if path.is_file())
        except OSError:
            return 0


def _step_of(folder: Path) -> int | None:
    """Return the step that a checkpoint's name gives; None if it is no such name."""
    return whole_number(folder.name.removeprefix("step-"))


def list_checkpoints(folder: Path, *, checksums: bool) -> list[FoundCheckpoint]:
    """Return every checkpoint in a folder, by step; `wrong` is the reason why one cannot be used.

    Args:
        checksums: whether to read every byte again; otherwise only the sizes are compared.
    """
    found = []
    for path in folder.glob("step-*"):
        if _step_of(path) is None or not path.is_dir():
            continue  # an unfinished save, or not ours
        try:
            found.append(FoundCheckpoint(path, verify_checkpoint(path, checksums=checksums)))
        except CheckpointError as error:
            if path.exists():  # otherwise it was removed in the meantime
                found.append(FoundCheckpoint(path, None, str(error)))
    return sorted(found, key=lambda item: item.step)


def rank_by_metric(found: Sequence[FoundCheckpoint], rule: Mapping[str, Any]) -> list[FoundCheckpoint]:
    """Those whose own weights were evaluated, the best first."""
    sign = -1 if rule.get("mode") == "max" else 1
    values = [
        (sign * value, item.step, item)
        for item in found
        if item.manifest is not None and (value := item.manifest.value_of(rule.get("metric", "val_loss"))) is not None
    ]
    return [item for _, _, item in sorted(values, key=lambda entry: entry[:2])]


def newest_valid(folder: Path, warn: Callable[[str], None]) -> FoundCheckpoint | None:
    """Return the newest checkpoint whose every byte is as it was written; None if there is none at all.

    Args:
        warn: called with a line about each newer checkpoint that cannot be used.

    Raises:
        CheckpointError: if there are checkpoints and none can be used: a run must not start from
            the beginning because a disk did not respond.
    """
    candidates = list_checkpoints(folder, checksums=False)
    for candidate in reversed(candidates):
        wrong = candidate.wrong
        if not wrong:
            try:
                return FoundCheckpoint(candidate.folder, verify_checkpoint(candidate.folder))
            except CheckpointError as error:
                wrong = str(error)
        warn(f"checkpoint {candidate.folder} is not used: {wrong}")
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoint(s) in {folder} can be used; the newest: {wrong}. "
            "Repair them, or start from the beginning with resume=never, which sets them aside"
        )
    return None


def select_checkpoint(run: Path, which: str) -> FoundCheckpoint:
    """Return the checkpoint that `which` names.

    Args:
        which: `best` (the last one if nothing was evaluated), `last` or the number of a step.

    Raises:
        CheckpointError: if there is none; the message lists those that exist.
    """
    found = [c for c in list_checkpoints(run / "checkpoints", checksums=False) if not c.wrong]
    if not found:
        raise CheckpointError(f"{run} holds no valid checkpoint: give a run's directory")
    last = found[-1]
    best = last.manifest.best if last.manifest is not None else None
    if which == "last" or (which == "best" and best is None):
        return last
    wanted = str(best.step) if which == "best" and best is not None else which
    for candidate in found:
        if str(candidate.step) == wanted:
            return candidate
    steps = ", ".join(str(candidate.step) for candidate in found)
    raise CheckpointError(f"--which is {which!r}: {run} has best, last and the steps {steps}")
