"""The objects of `run.prepare`: modules, optimizers and schedulers, and the parameters that train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.errors import TaskError


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
