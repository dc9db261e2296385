"""Refuses what lanes cannot train before the first step, with what to do instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from samestep.errors import StepError, TaskError


def refuse_unsupported(
    modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], same: str, device: torch.device
) -> None:
    """Refuse modules and optimizers that would fail, or differ, on another number of ranks.

    Raises:
        TaskError: With everything that was found.
    """
    found = [*_modules(modules, same, device), *_optimizers(optimizers)]
    if found:
        raise TaskError("\n".join(found))


def _modules(modules: Sequence[nn.Module], same: str, device: torch.device) -> Iterator[str]:
    named = [(name, part) for module in modules for name, part in module.named_modules()]
    for name, part in named:
        kind = type(part).__name__
        if kind in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
            yield (
                f"{name or 'the model'} is wrapped in {kind}, which would add up gradients a second time: give "
                "run.prepare the model itself, without the wrapper (its .module). The optimizer stays as it is"
            )
            continue
        if any(map(is_lazy, part.parameters(recurse=False))):
            yield (
                f"{name or kind} is a {kind} whose shapes are not known yet, and all ranks must start from "
                "the same weights: give the shapes, or put a batch through the model before"
            )
            continue
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            yield (
                f"{name or kind} is an {kind} with sparse=True, but lanes are added up as dense "
                "gradients: set sparse=False"
            )
        elif isinstance(part, nn.SyncBatchNorm) and (same == "bits" or device.type != "cuda"):
            why = (
                "normalises over ranks, so that their number changes the run"
                if same == "bits"
                else f"does not run on {device.type}"
            )
            yield (
                f"{name or kind} is a SyncBatchNorm, which {why}: use BatchNorm, which normalises over a "
                "lane's samples on any number of ranks"
            )


def _optimizers(optimizers: Sequence[Optimizer]) -> Iterator[str]:
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            yield (
                "LBFGS evaluates the loss several times in one step, and a step of lanes gives it one "
                "gradient: use an optimizer that needs one, such as AdamW"
            )


def has_batchnorm(module: nn.Module) -> bool:
    """Return whether a layer in it normalises over samples."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return any(isinstance(part, kinds) for part in module.modules())


def lonely_samples(modules: Sequence[nn.Module], lane_batch: int, tail: int) -> str:
    """Return a warning where BatchNorm gets one sample alone; empty if it does not.

    Args:
        tail: Samples in the last lane of an epoch, if that is not whole; else 0.
    """
    if not any(map(has_batchnorm, modules)):
        return ""
    if lane_batch == 1:
        return (
            "a lane has 1 sample, and BatchNorm normalises over a lane: over one sample there is nothing "
            "to normalise, and torch refuses BatchNorm1d. Use fewer lanes, a larger global_batch, or "
            "GroupNorm"
        )
    if tail == 1:
        return (
            "the last lane of an epoch has 1 sample, and BatchNorm normalises over a lane: torch refuses "
            "BatchNorm1d there. Set drop_last: true, or another global_batch"
        )
    return ""


def refuse_frozen_gradients(frozen: Sequence[tuple[str, Parameter]]) -> None:
    """Refuse gradients of parameters, by name, that were frozen when the run was prepared."""
    for name, param in frozen:
        if param.grad is not None:
            raise StepError(
                f"parameter {name} was frozen when the run was prepared and now has a "
                "gradient, which no other rank would get. Unfreeze it before run.prepare"
            )
