"""A checkpoint in the layout that other projects read."""

from __future__ import annotations

from pathlib import Path

import torch

from samestep.checkpoint.format import Manifest, read_model, read_training, verify_checkpoint
from samestep.checkpoint.state import exported
from samestep.checkpoint.store import Found, list_checkpoints
from samestep.errors import CheckpointError


def export_checkpoint(run: Path, which: str, to: Path) -> Manifest:
    """Write a run's best, last or n-th checkpoint as one file of torch.save."""
    folder = pick(run, which).folder
    try:
        manifest = verify_checkpoint(folder)
        state = exported(read_model(folder), read_training(folder), manifest.epoch)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    partial = to.with_name(to.name + ".partial")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, partial)
        partial.replace(to)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{to} could not be written: {error}") from error
    return manifest


def pick(run: Path, which: str) -> Found:
    """The checkpoint of a run that `which` names: best, last, or a step."""
    found = [c for c in list_checkpoints(run / "checkpoints", checksums=False) if not c.wrong]
    if not found:
        raise CheckpointError(f"{run} holds no whole checkpoint: give a run's directory")
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
