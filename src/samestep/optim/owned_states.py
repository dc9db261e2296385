"""Optimizer states that only the owners of parameters hold (`distributed.shard: optimizer`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from samestep.distributed.collectives import Collectives
from samestep.errors import TaskError
from samestep.reduce.owners import Owners

_TRIED_STEPS = 3


class OwnedStates:
    """The states of a run's optimizers, of which each rank holds those of its own parameters."""

    def __init__(
        self, owners: Owners, optimizers: Sequence[Optimizer], collectives: Collectives
    ) -> None:
        self._owners, self._optimizers, self._collectives = owners, optimizers, collectives
        self.drop_others()

    def drop_others(self) -> None:
        """Let go of the states of parameters that other ranks own, which a checkpoint has brought."""
        for optimizer in self._optimizers:
            for param in [p for p in optimizer.state if not self._owners.is_mine(p)]:
                del optimizer.state[param]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let rank 0 have all states in this block, others' in host memory. Every rank enters it."""
        self._gather()
        try:
            yield
        finally:
            self.drop_others()

    def _gather(self) -> None:
        params = [_params(optimizer) for optimizer in self._optimizers]
        mine = [
            (number, at, _described(optimizer.state[param]))
            for number, optimizer in enumerate(self._optimizers)
            for at, param in enumerate(params[number])
            if param in optimizer.state
        ]
        is_main = self._owners.rank == 0
        for rank, described in enumerate(self._collectives.gather(mine)):
            if rank == 0 or self._owners.rank not in (0, rank):
                continue
            for number, at, state in described:
                held = self._optimizers[number].state
                if is_main:
                    held[params[number][at]] = self._received(state, rank)
                else:
                    self._send(held[params[number][at]], state)

    def _send(self, state: dict[str, Any], described: dict[str, Any]) -> None:
        for name, value in described.items():
            if isinstance(value, _Shape):
                tensor = state[name].detach().contiguous()
                dist.send(tensor.to(self._collectives.wire(tensor.device)), 0)

    def _received(self, described: dict[str, Any], rank: int) -> dict[str, Any]:
        return {
            name: value.received(rank, self._collectives) if isinstance(value, _Shape) else value
            for name, value in described.items()
        }


class _Shape(tuple[Any, ...]):
    """The shape, dtype and device type of a tensor that is sent."""

    def received(self, rank: int, collectives: Collectives) -> Tensor:
        """Return the tensor that another rank sends."""
        shape, dtype, device = self
        place = torch.empty(shape, dtype=dtype, device=collectives.wire(torch.device(device)))
        dist.recv(place, rank)
        return place.cpu()


def _described(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _Shape((tuple(value.shape), value.dtype, value.device.type))
        if isinstance(value, Tensor)
        else value
        for name, value in state.items()
    }


def _params(optimizer: Optimizer) -> list[Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


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
    device = _params(optimizer)[0].device
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
