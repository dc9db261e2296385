"""Chooses the checkpoint that a run resumes from, and checks that its config still describes the same run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.listing import newest_valid
from samestep.checkpoint.manifest import Manifest, folder_name, verify_checkpoint
from samestep.config import Config
from samestep.config.schema import PLANNED_KEYS, SHAPING_KEYS
from samestep.errors import CheckpointError
from samestep.parsing.files import is_folder


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from."""

    folder: Path
    manifest: Manifest
    branches: bool = False
    """Whether a new run branches off here, rather than the run in the directory resuming."""
    origin: Path | None = None
    """Where a branch's checkpoint was found, if `folder` is a copy of it."""

    @property
    def shown(self) -> Path:
        """The directory that a person knows."""
        return self.origin or self.folder


def find_resume_point(
    config: Config, folder: Path, began_here: bool, warn: Callable[[str], None], branched_from: str | None = None
) -> ResumePoint | None:
    """Return the checkpoint to resume from; None for a run that starts from the beginning.

    Args:
        began_here: whether this very launch started the run in the folder and is now restarted:
            then it resumes, even with `never` and `best`.
        branched_from: the `resume.checkpoint` that the run in the folder was started with.

    Raises:
        CheckpointError: if the requested checkpoint is missing or damaged.
    """
    requested = config.resume.checkpoint
    own = folder / "checkpoints"
    if requested == "never" and not began_here:
        return None
    if requested == "best" and not began_here:
        return _best_point(own, warn)
    if requested in ("auto", "best", "never"):
        return _newest_point(own, warn)
    # A run that was started from a path and interrupted resumes from its own checkpoints; the copy
    # that it began with is one, and may have outlived its origin.
    newest = _newest_or_warn(own, warn)
    if newest is not None and requested in (branched_from, _started_from(newest.manifest.config)):
        return newest
    path = Path(requested)
    if newest is not None and path.resolve() == newest.folder.resolve():
        return newest
    if is_folder(path / "checkpoints"):
        found = _newest_point(path / "checkpoints", warn)
        if found is None:
            raise CheckpointError(f"resume.checkpoint: {path} holds no valid checkpoint")
        return replace(found, branches=True)
    try:
        return ResumePoint(path, verify_checkpoint(path), branches=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"resume.checkpoint: {path} is not a valid checkpoint: {error}. Give a directory such "
            "as runs/NAME/checkpoints/step-00000120, a run directory, auto, best or never"
        ) from None


def _best_point(own: Path, warn: Callable[[str], None]) -> ResumePoint:
    """Return where a run that went on after its best evaluation begins again."""
    newest = _newest_point(own, warn)
    best = None if newest is None else newest.manifest.best
    if newest is None or best is None:
        found = "holds no checkpoint" if newest is None else "was never evaluated"
        raise CheckpointError(f"resume.checkpoint is best, and the run in {own.parent} {found}: use auto")
    if best.step == newest.manifest.step:
        return newest
    folder = own / folder_name(best.step)
    try:
        return ResumePoint(folder, verify_checkpoint(folder), branches=True)
    except CheckpointError as error:
        raise CheckpointError(f"resume.checkpoint is best, and {folder} cannot be used: {error}") from None


def _started_from(config: Mapping[str, Any]) -> Any:
    section = config.get("resume")
    return section.get("checkpoint") if isinstance(section, Mapping) else None


def _newest_or_warn(folder: Path, warn: Callable[[str], None]) -> ResumePoint | None:
    """Like `_newest_point`, when another checkpoint is requested: damaged ones do not matter."""
    try:
        return _newest_point(folder, warn)
    except CheckpointError as error:
        warn(str(error))
        return None


def _newest_point(folder: Path, warn: Callable[[str], None]) -> ResumePoint | None:
    found = newest_valid(folder, warn)
    if found is None or found.manifest is None:
        return None
    return ResumePoint(found.folder, found.manifest)


def refuse_another_run(config: Config, plan: Mapping[str, Any], point: ResumePoint) -> None:
    """Refuse to resume with a config that describes another run.

    Raises:
        CheckpointError: with each difference, and how to resume nevertheless.
    """
    now = config.model_dump(mode="json")
    saved = point.manifest.config
    different = [
        difference
        for key in SHAPING_KEYS
        if key not in config.resume.allow and not _same(key, now.get(key), saved.get(key))
        for difference in _differences(key, saved.get(key), now.get(key))
    ]
    different += [
        f"{key} was {point.manifest.plan.get(key)}, is {plan[key]}"
        for key in PLANNED_KEYS
        if key in plan and key not in config.resume.allow and point.manifest.plan.get(key) != plan[key]
    ]
    if not different:
        return
    keys = ", ".join(dict.fromkeys(re.split(r"[ .]", line)[0] for line in different))
    raise CheckpointError(
        f"{point.shown} was written by another run than this config describes:\n  - "
        + "\n  - ".join(different)
        + f"\nTo resume nevertheless: resume.allow=[{keys}]. To start from the beginning and set the "
        "earlier run aside: resume=never. To keep both: another name or run_dir"
    )


def warn_of_other_bits(plan: Mapping[str, Any], point: ResumePoint, report: Callable[[str], None]) -> None:
    """Report what has changed about the machine, if the last bit can depend on it."""
    changed = [
        f"{key} was {point.manifest.plan[key]}, is {plan[key]}"
        for key in ("device", "precision", "deterministic", "compiled", "threads_per_rank")
        if key in plan and point.manifest.plan.get(key, plan[key]) != plan[key]
    ]
    version = str(torch.__version__)
    if point.manifest.versions.get("torch", version) != version:
        changed.append(f"torch was {point.manifest.versions['torch']}, is {version}")
    if changed:
        report(f"The same run, but perhaps not to the last bit: {'; '.join(changed)}")


def _same(key: str, now: Any, saved: Any) -> bool:
    if key == "task" and isinstance(now, str) and isinstance(saved, str):
        # The file may be given relative to another folder: the class counts.
        return now.rpartition(":")[2] == saved.rpartition(":")[2]
    if key == "fold" and isinstance(now, Mapping) and isinstance(saved, Mapping):
        return now.get("number") == saved.get("number")  # its file is found likewise
    return bool(now == saved)


def _differences(key: str, saved: Any, now: Any) -> Iterator[str]:
    """Yield what differs, key by key where both have the section."""
    if key != "params" and isinstance(saved, Mapping) and isinstance(now, Mapping):
        for inner in now:
            if saved.get(inner) != now[inner]:
                yield from _differences(f"{key}.{inner}", saved.get(inner), now[inner])
        return
    yield f"{key} was {_shown(saved)}, is {_shown(now)}"


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
