"""A checkpoint as one file of torch.save, in the layout that other projects read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.choose_weights import model_state
from samestep.checkpoint.files import refuse_existing, replacing
from samestep.checkpoint.format import read_training
from samestep.checkpoint.listing import select_checkpoint
from samestep.checkpoint.manifest import Manifest, verify_checkpoint
from samestep.checkpoint.state import require
from samestep.errors import CheckpointError, OutputError

KEYS = ("model_state_dict", "optimizer_state_dict", "epoch")


def write_torch_file(
    run: Path, which: str, to: Path, force: bool = False, weights: str = "raw", extra: Mapping[str, Any] | None = None
) -> Manifest:
    """Write a checkpoint as {"model_state_dict", "optimizer_state_dict", "epoch"}.

    Args:
        weights: raw, ema, swa or average.
        extra: further keys of the file, such as the config of the program that reads it.

    Returns:
        The manifest of the checkpoint.

    Raises:
        CheckpointError: if there is no such checkpoint, it is damaged, or `to` cannot be written.
        OutputError: if `to` exists, or a further key has the name of one of these.
    """
    taken = [key for key in KEYS if key in (extra or {})]
    if taken:
        raise OutputError(f"the file has {', '.join(taken)} already: choose other names for the extra keys")
    if not force:
        refuse_existing(to)
    folder = select_checkpoint(run, which).folder
    try:
        manifest = verify_checkpoint(folder)
        training = read_training(folder)
        state = _merge(model_state(run, folder, weights, training), training, manifest.epoch)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with replacing(to) as partial:
            torch.save({**state, **(extra or {})}, partial)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{to} could not be written: {error}") from error
    return manifest


def _merge(model: dict[str, Any], training: Mapping[str, Any], epoch: int) -> dict[str, Any]:
    """One optimizer as itself, several as a list."""
    require(training, "optimizers")
    optimizers = training["optimizers"]
    return {
        "model_state_dict": model,
        "optimizer_state_dict": optimizers[0] if len(optimizers) == 1 else optimizers,
        "epoch": epoch,
    }
