"""Where a run goes on from, and whether its config still describes the same run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.format import Manifest, verify_checkpoint
from samestep.checkpoint.store import newest_valid
from samestep.config import Config
from samestep.config.schema import PLANNED_KEYS, SHAPING_KEYS
from samestep.errors import CheckpointError


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run goes on from."""

    folder: Path
    manifest: Manifest
    branches: bool = False
    """Whether another run begins here, and not the one goes on that is in the directory."""


def find_resume_point(
    config: Config, folder: Path, began_here: bool, warn: Callable[[str], None]
) -> ResumePoint | None:
    """The checkpoint to go on from as the config says; None for a run from the beginning.

    `began_here` says that this very launch began the run that is in the folder, and is now
    restarted: then it goes on, also with `never`.
    """
    asked = config.resume.checkpoint
    own = folder / "checkpoints"
    if asked == "never" and not began_here:
        return None
    if asked in ("auto", "never"):
        return _point(own, warn)
    # A run that was started from a path, and interrupted, goes on from its own checkpoints.
    newest = _own_point(own, warn)
    if newest is not None and newest.manifest.config.get("resume", {}).get("checkpoint") == asked:
        return newest
    path = Path(asked)
    if newest is not None and path.resolve() == newest.folder.resolve():
        return newest
    if (path / "checkpoints").is_dir():
        found = _point(path / "checkpoints", warn)
        if found is None:
            raise CheckpointError(f"resume.checkpoint: {path} holds no whole checkpoint")
        return replace(found, branches=True)
    try:
        return ResumePoint(path, verify_checkpoint(path), branches=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"resume.checkpoint: {path} is not a whole checkpoint: {error}. Give a directory such "
            "as runs/NAME/checkpoints/step-00000120, a run directory, auto or never"
        ) from None


def _own_point(folder: Path, warn: Callable[[str], None]) -> ResumePoint | None:
    """Like `_point` where another checkpoint was asked for: damaged ones here do not matter."""
    try:
        return _point(folder, warn)
    except CheckpointError as error:
        warn(str(error))
        return None


def _point(folder: Path, warn: Callable[[str], None]) -> ResumePoint | None:
    found = newest_valid(folder, warn)
    if found is None or found.manifest is None:
        return None
    return ResumePoint(found.folder, found.manifest)


def refuse_another_run(config: Config, plan: Mapping[str, Any], point: ResumePoint) -> None:
    """Refuse to go on with a config that would make it another run; names each difference."""
    now, saved = config.model_dump(mode="json"), point.manifest.config
    different = [
        difference
        for key in SHAPING_KEYS
        if key not in config.resume.allow and not _same(key, now.get(key), saved.get(key))
        for difference in _differences(key, saved.get(key), now.get(key))
    ]
    different += [
        f"{key} was {point.manifest.plan.get(key)}, is {plan[key]}"
        for key in PLANNED_KEYS
        if key in plan
        and key not in config.resume.allow
        and point.manifest.plan.get(key) != plan[key]
    ]
    if not different:
        return
    keys = ", ".join(dict.fromkeys(re.split(r"[ .]", line)[0] for line in different))
    raise CheckpointError(
        f"{point.folder} was written by another run than this config describes:\n  - "
        + "\n  - ".join(different)
        + f"\nTo go on all the same: resume.allow=[{keys}]. To begin anew, setting the earlier run "
        "aside: resume=never. To keep both: another name or run_dir"
    )


def warn_of_other_bits(
    plan: Mapping[str, Any], point: ResumePoint, tell: Callable[[str], None]
) -> None:
    """Say what is not the same machine any more, where the last bit can depend on it."""
    changed = [
        f"{key} was {point.manifest.plan[key]}, is {plan[key]}"
        for key in ("device", "precision", "compiled", "threads_per_rank")
        if key in plan and point.manifest.plan.get(key, plan[key]) != plan[key]
    ]
    version = str(torch.__version__)
    if point.manifest.versions.get("torch", version) != version:
        changed.append(f"torch was {point.manifest.versions['torch']}, is {version}")
    if changed:
        tell(f"The same run, but perhaps not to the last bit: {'; '.join(changed)}")


def _same(key: str, now: Any, saved: Any) -> bool:
    if key == "task" and isinstance(now, str) and isinstance(saved, str):
        # The file may be named from another folder; which class it is counts.
        return now.rpartition(":")[2] == saved.rpartition(":")[2]
    return bool(now == saved)


def _differences(key: str, saved: Any, now: Any) -> Iterator[str]:
    """What differs, key by key where both have the section."""
    if key != "params" and isinstance(saved, Mapping) and isinstance(now, Mapping):
        for inner in now:
            if saved.get(inner) != now[inner]:
                yield from _differences(f"{key}.{inner}", saved.get(inner), now[inner])
        return
    yield f"{key} was {_shown(saved)}, is {_shown(now)}"


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
