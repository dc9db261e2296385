"""Optimizers whose update of a parameter depends on other parameters, which owners cannot step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from samestep.errors import TaskError
from samestep.reduce.owned_states import params_of

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
    if type(optimizer).__module__.startswith("torch.optim."):
        return ""  # each of torch's steps a parameter by itself; LBFGS is refused anyway
    device = params_of(optimizer)[0].device
    try:
        with torch.random.fork_rng():
            together = _stepped(optimizer, (0, 1), device)
        alone = []
        for number in (0, 1):
            with torch.random.fork_rng():
                alone += _stepped(optimizer, (number,), device)
    except Exception as error:
        return f"cannot be tried on two small parameters ({type(error).__name__}: {error})"
    if all(torch.equal(a, b) for a, b in zip(together, alone, strict=True)):
        return ""
    return "updates a parameter differently when it has others"


def _stepped(optimizer: Optimizer, numbers: Sequence[int], device: torch.device) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    values = [torch.randn(4, 4, generator=made) for _ in range(2 + 2 * _TRIED_STEPS)]
    params = [Parameter(values[number].to(device)) for number in numbers]
    tried = type(optimizer)(params, **optimizer.defaults)
    for step in range(_TRIED_STEPS):
        for number, param in zip(numbers, params, strict=True):
            param.grad = values[2 + 2 * step + number].to(device, copy=True)
        tried.step()
    return [param.detach() for param in params]
