"""States, weights and averages that only the owners of parameters hold (`distributed.shard`), gathered for a save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from samestep.checkpoint.parts import Part
from samestep.checkpoint.state import RunState, stored_once
from samestep.distributed.collectives import Collectives
from samestep.errors import StepError
from samestep.pytree import tensors
from samestep.reduce.owners import Owners, is_held
from samestep.reduce.sharded_weights import ShardedWeights


class Average(Protocol):
    """An average of weights, of which each rank holds that of its own (`distributed.shard: weights`)."""

    others: dict[str, Tensor]

    @property
    def held(self) -> dict[str, Tensor]: ...

    @property
    def is_of_held(self) -> bool: ...


class OwnedStates:
    """The states of a run's optimizers, and with `shard: weights` the weights, which only owners hold."""

    def __init__(
        self,
        owners: Owners,
        optimizers: Sequence[Optimizer],
        collectives: Collectives,
        weights: ShardedWeights | None = None,
    ) -> None:
        self._owners, self._optimizers, self._collectives = owners, optimizers, collectives
        self._weights = weights
        self.averages: list[Average] = []
        """Averages of the weights, where these are sharded."""
        self.drop_others()
        if weights is not None:
            self._follow_weights()

    def drop_others(self) -> None:
        """Let go of the states of parameters that other ranks own, which a checkpoint has brought."""
        for optimizer in self._optimizers:
            for param in [p for p in optimizer.state if not self._owners.is_mine(p)]:
                del optimizer.state[param]
        for average in self.averages:
            average.others = {}

    def _follow_weights(self) -> None:
        """Move states that a checkpoint has brought to where the weights are now."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                on_host = () if group.get("capturable") or group.get("fused") else ("step",)
                for param in group["params"]:
                    state = optimizer.state.get(param, {})
                    for name, value in state.items():
                        if isinstance(value, Tensor) and name not in on_host:
                            state[name] = value.to(param.device)

    def keep(self, average: Average) -> None:
        """Gather an average of the weights with them."""
        if self._weights is None:
            return
        if not average.is_of_held:
            raise StepError(
                "an average of the weights was made before run.prepare, which has dealt them out (distributed.shard: "
                "weights): make it afterwards, of run.model"
            )
        self.averages.append(average)

    @property
    def part(self) -> Part:
        """Return which part of a checkpoint this rank writes."""
        return Part(self._owners.rank, self._owners.world, self._weights is not None)

    def take_part(self, state: RunState) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the model's tensors and the rest in this rank's part; rank 0's has what every rank holds."""
        with nullcontext() if self._weights is None else self._weights.in_parts():
            averages = {
                name: average
                for name, item in state.kept.items()
                for average in self.averages
                if id(item) == id(average)
            }
            if self._owners.rank == 0:
                training = state.training()
                training["modules"] = [_held(module) for module in training["modules"]]
                for name, kept in training["kept"].items():
                    if name in averages:
                        kept["model"] = _held(kept["model"])
                    elif self._weights is not None:
                        _refuse_absent(name, kept)
                return _held(state.model_tensors()), training
            model, *others = map(self._owned_weights, state.modules)
            held = {name: {"model": average.held} for name, average in averages.items()}
            states = [{"state": optimizer.state_dict()["state"]} for optimizer in state.optimizers]
            return model, {"modules": others, "optimizers": states, "kept": held}

    def _owned_weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the weights that no other rank has, by name."""
        if self._weights is None:
            return {}
        state = stored_once(module.state_dict(keep_vars=True))
        return {name: w.detach() for name, w in state.items() if self._owners.is_only_mine(w)}

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let rank 0 have everything in this block, others' in host memory. Every rank enters it."""
        self._gather()
        try:
            with nullcontext() if self._weights is None else self._weights.on_main():
                yield
        finally:
            self.drop_others()

    def _gather(self) -> None:
        params = [params_of(optimizer) for optimizer in self._optimizers]
        mine = [
            ((number, at), _described(optimizer.state[param]))
            for number, optimizer in enumerate(self._optimizers)
            for at, param in enumerate(params[number])
            if param in optimizer.state
        ]
        mine += [((-1, at), _described(a.held)) for at, a in enumerate(self.averages)]
        is_main = self._owners.rank == 0
        for rank, described in enumerate(self._collectives.gather(mine)):
            if rank == 0 or self._owners.rank not in (0, rank):
                continue
            for (number, at), state in described:
                if number < 0:
                    if is_main:
                        self.averages[at].others |= self._received(state, rank)
                    else:
                        self._send(self.averages[at].held, state)
                    continue
                held = self._optimizers[number].state
                if is_main:
                    held[params[number][at]] = self._received(state, rank)
                else:
                    self._send(held[params[number][at]], state)

    def _send(self, state: dict[str, Any], described: dict[str, Any]) -> None:
        for name, value in described.items():
            if isinstance(value, _Shape):
                tensor = _in_memory_order(state[name].detach())
                dist.send(tensor.to(self._collectives.wire(tensor.device)), 0)

    def _received(self, described: dict[str, Any], rank: int) -> dict[str, Any]:
        return {
            name: value.received(rank, self._collectives) if isinstance(value, _Shape) else value
            for name, value in described.items()
        }


class _Shape(tuple[Any, ...]):
    """The shape, stride, dtype and device type of a tensor that is sent."""

    @classmethod
    def of(cls, tensor: Tensor) -> _Shape:
        """Return that of a tensor."""
        # A layout that is not dense becomes an ordinary one.
        stride = torch.empty_like(tensor, device="meta").stride()
        return cls((tuple(tensor.shape), stride, tensor.dtype, tensor.device.type))

    def received(self, rank: int, collectives: Collectives) -> Tensor:
        """Return the tensor that another rank sends."""
        shape, stride, dtype, device = self
        wire = collectives.wire(torch.device(device))
        place = torch.empty_strided(shape, stride, dtype=dtype, device=wire)
        dist.recv(_in_memory_order(place), rank)
        return place.cpu()


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return the elements as they lie in memory: fused kernels read moments in their weights' layout."""
    if tensor.stride() != torch.empty_like(tensor, device="meta").stride():
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))


def _refuse_absent(name: str, state: Any) -> None:
    """Raise if what a run keeps besides its modules has weights that other ranks hold."""
    if not all(is_held(leaf) for leaf in tensors(state)):
        raise StepError(
            f"the state of {name!r} (run.register) holds weights of the model, which other ranks own "
            "(distributed.shard: weights): the run saves the model's weights by itself, leave them out of state_dict()"
        )


def _held(state: dict[str, Any]) -> dict[str, Any]:
    """Return a module's state without weights that other ranks hold."""
    return {k: v for k, v in state.items() if not isinstance(v, Tensor) or is_held(v)}


def _described(state: dict[str, Any]) -> dict[str, Any]:
    return {name: _Shape.of(value) if isinstance(value, Tensor) else value for name, value in state.items()}


def params_of(optimizer: Optimizer) -> list[Parameter]:
    """Return all parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]
