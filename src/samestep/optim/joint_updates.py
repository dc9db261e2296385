"""Optimizers whose update of a parameter depends on other parameters, which owners cannot step."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from samestep.errors import TaskError

_TRIED_STEPS = 3


def refuse_joint_updates(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers whose update of a parameter depends on other parameters, found by trying.

    Raises:
        TaskError: Such an optimizer computes something else where each rank steps its own parameters.
    """
    for optimizer in optimizers:
        why = _why_joint(optimizer)
        if why:
            raise TaskError(
                f"distributed.shard: optimizer, but {type(optimizer).__name__} {why}: each rank steps "
                "only its own parameters. Set shard: none, or take another optimizer"
            )


def _why_joint(optimizer: Optimizer) -> str:
    inner = [type(held).__name__ for held in vars(optimizer).values() if isinstance(held, Optimizer)]
    if inner:
        return f"holds another optimizer ({inner[0]}), whose states are its own"
    if type(optimizer).__module__.startswith("torch.optim."):
        return ""  # each of torch's steps a parameter by itself; LBFGS is refused anyway
    try:
        for group in optimizer.param_groups:
            together = _stepped(optimizer, group, (0, 1))
            alone = [_stepped(optimizer, group, (number,))[0] for number in (0, 1)]
            if not all(torch.equal(a, b) for a, b in zip(together, alone, strict=True)):
                return "updates a parameter differently when it has others"
    except Exception as error:
        return f"cannot be tried on two small parameters ({type(error).__name__}: {error})"
    return ""


def _stepped(optimizer: Optimizer, group: dict[str, Any], numbers: Sequence[int]) -> list[Tensor]:
    """Return what a copy of the optimizer makes of some of two small parameters."""
    made, device = torch.Generator().manual_seed(0), group["params"][0].device
    values = [torch.randn(4, 4, generator=made) for _ in range(2 + 2 * _TRIED_STEPS)]
    params = [Parameter(values[number].to(device, copy=True)) for number in numbers]
    twin = object.__new__(type(optimizer))  # copy.copy would lose what is not in torch's own state
    vars(twin).update(vars(optimizer))
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": params}]
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    with torch.random.fork_rng():
        for step in range(_TRIED_STEPS):
            for number, param in zip(numbers, params, strict=True):
                param.grad = values[2 + 2 * step + number].to(device, copy=True)
            type(twin).step(twin)
    return [param.detach() for param in params]
