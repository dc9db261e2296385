"""A trainer's checkpoint: one file of torch.save, whole or not there, read without running code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoint.files import DigestedFile, Files, replacing, sha256_of
from samestep.checkpoint.format import save_by_torch
from samestep.checkpoint.snapshot import Snapshot
from samestep.checkpoint.state import RunState
from samestep.distributed.context import RunContext
from samestep.errors import CheckpointError

MODEL, OPTIMIZER, SCHEDULER = "model_state_dict", "optimizer_state_dict", "scheduler_state_dict"
TRAINER, METADATA = "trainer", "metadata"


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Write a copy of the state under another name, and give it its name when it is on the disk."""
    files = Files()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Ranks that all write get separate temporary names, and write the same.
        with replacing(path) as partial, DigestedFile(files, partial) as file:
            save_by_torch(Snapshot().take(state), file)
        files.sync(path.parent)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error


def read_on_all(path: Path, context: RunContext) -> dict[str, Any]:
    """Return what every rank finds in the file; if one cannot read it, or finds another, all fail."""
    state: dict[str, Any] = {}
    wrong = digest = ""
    try:
        digest = sha256_of(path)
        state = _read(path)
    except OSError as error:
        wrong = f"cannot be read: {error.strerror or error}"
    except CheckpointError as error:
        wrong = str(error)
    found = context.gather((digest, wrong))
    for rank, (_, why) in enumerate(found):
        if why:
            raise CheckpointError(f"{path} {f'on rank {rank} ' if context.world > 1 else ''}{why}")
    others = [rank for rank, (other, _) in enumerate(found) if other != found[0][0]]
    if others:
        raise CheckpointError(
            f"{path} is not the same file on rank 0 and on rank {others[0]}: give all ranks one file, or copies of it"
        )
    return state


def _read(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except OSError:
        raise
    except Exception as error:  # an unpickler fails on bad bytes in more ways than one can list
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(f"cannot be read without running code from it, which is never done: {reason}") from None
    if not isinstance(state, dict) or not {MODEL, TRAINER, METADATA} <= state.keys():
        raise CheckpointError("was not written by save_checkpoint")
    return state


def put_back(
    path: Path, state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None
) -> None:
    """Put a checkpoint's state into these objects; what does not fit leaves the model as it was."""
    model_state = state[MODEL]
    with_optimizer = OPTIMIZER in state
    schedulers = [scheduler] if with_optimizer and scheduler is not None else []
    target = RunState([model], [optimizer] if with_optimizer else [], schedulers, {})
    before = Snapshot().take(model.state_dict())
    try:
        target.load(
            {name: value for name, value in model_state.items() if isinstance(value, Tensor)},
            {
                "model": {k: v for k, v in model_state.items() if not isinstance(v, Tensor)},
                "shared": target.training()["shared"],
                "modules": [],
                "optimizers": [state[OPTIMIZER]] if with_optimizer else [],
                "schedules": [state[SCHEDULER]] if SCHEDULER in state else [],
            },
        )
    except CheckpointError as error:
        model.load_state_dict(before)
        raise CheckpointError(f"{path}: {error}") from error
