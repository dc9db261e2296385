"""The objects of `run.prepare`: modules, optimizers and schedulers, and the parameters that train.

What lanes cannot train is refused here, before the first step. A resumed run's model may come on torch's
meta device: it gets memory for what this rank holds, which the checkpoint then fills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.errors import StepError, TaskError


def sorted_by_kind(objects: Sequence[Any]) -> tuple[list[nn.Module], list[Optimizer], list[LRScheduler]]:
    """Return modules, optimizers and schedulers, each in their order.

    Raises:
        TaskError: Something else is among them, or there is no model or optimizer.
    """
    modules = [item for item in objects if isinstance(item, nn.Module)]
    optimizers = [item for item in objects if isinstance(item, Optimizer)]
    schedules = [item for item in objects if isinstance(item, LRScheduler)]
    other = [o for o in objects if not isinstance(o, nn.Module | Optimizer | LRScheduler)]
    if other:
        raise TaskError(
            "run.prepare takes modules, optimizers, schedulers, a GradScaler and DataLoaders; it got "
            f"{', '.join(type(item).__name__ for item in other)}. State to be saved: run.register(name, object). "
            "A function that draws batches: for i, batch in run.enumerate(samestep.Generated(function))"
        )
    if not modules or not optimizers:
        missing = "the model" if not modules else "its optimizer"
        given = ", ".join(type(item).__name__ for item in objects) or "nothing to train"
        raise TaskError(f"run.prepare got {given}, and not {missing}: give it both, with the DataLoaders, in one call")
    return modules, optimizers, schedules


def trainable(
    optimizers: Sequence[Optimizer], modules: Sequence[nn.Module]
) -> tuple[list[tuple[str, Parameter]], list[tuple[str, Parameter]]]:
    """Return the optimizers' parameters by name: those that train, and those that are frozen."""
    names = {id(p): name for module in modules for name, p in module.named_parameters()}
    seen: dict[int, tuple[str, Parameter]] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                name = names.get(id(param), f"optimizer {number} parameter {index}")
                seen.setdefault(id(param), (name, param))
    every = list(seen.values())
    return [p for p in every if p[1].requires_grad], [p for p in every if not p[1].requires_grad]


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


def give_memory(model: nn.Module, holds: Callable[[Tensor], bool], is_resumed: bool) -> bool:
    """Give a model's tensors host memory where they are on the meta device; return whether some are.

    Args:
        holds: Returns whether this rank holds a parameter. Others keep their shape, without memory.

    Raises:
        TaskError: There is no checkpoint, or it does not have a tensor.
    """
    params = [param for param in model.parameters() if param.is_meta]
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_meta}
    if not params and not buffers:
        return False
    if not is_resumed:
        raise TaskError(
            f"the {type(model).__name__} is on the meta device, where it has no weights, and no checkpoint is resumed: "
            'build it there only in a resumed run, with torch.device("meta" if run.start_step else "cpu")'
        )
    unsaved = sorted(buffers.keys() - model.state_dict().keys())
    if unsaved:
        raise TaskError(
            f"the {type(model).__name__} is on the meta device, and {', '.join(unsaved)} is in no checkpoint "
            "(persistent=False): build the model on the CPU, or make these buffers there"
        )
    _refuse_what_is_lost(model)
    rnns = [part for part in model.modules() if isinstance(part, nn.RNNBase)]
    for rnn in rnns:
        rnn._flat_weight_refs = []  # weak ones, with which nothing can be swapped
    for param in params:
        memory = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="cpu")
        if not holds(param):
            memory.untyped_storage().resize_(0)
        made = Parameter(memory, param.requires_grad)
        made.__dict__.update(param.__dict__)
        torch.utils.swap_tensors(param, made)  # optimizers have it already
    for rnn in rnns:
        rnn._init_flat_weights()
    made_buffers: dict[int, Tensor] = {}  # one that several modules share stays one
    for part in model.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                like = torch.empty_like(buffer, device="cpu")
                part._buffers[name] = made_buffers.setdefault(id(buffer), like)
    return True


def _refuse_what_is_lost(model: nn.Module) -> None:
    """Refuse parameters whose hooks or class would not be there any more."""
    for name, param in model.named_parameters():
        hooks = param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None)
        if param.is_meta and (hooks or type(param) is not Parameter):
            what = "has hooks" if hooks else f"is a {type(param).__name__}"
            raise TaskError(
                f"{name} {what}, which a model on the meta device would lose when it gets memory: build it on the CPU"
            )
