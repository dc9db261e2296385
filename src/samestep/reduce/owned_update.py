"""Updates by owners: each rank steps its own parameters, and all ranks get the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from samestep.distributed.collectives import TorchCollectives
from samestep.errors import TaskError
from samestep.reduce.owned_states import params_of
from samestep.reduce.owned_sum import OwnedSum
from samestep.reduce.sharded_weights import ShardedWeights


class OwnedUpdate:
    """Clipping and optimizer steps of a run with `distributed.shard`."""

    def __init__(self, sums: OwnedSum, collectives: TorchCollectives, weights: ShardedWeights | None = None) -> None:
        self.owners, self.sums, self.weights = sums.owners, sums, weights
        self._collectives = collectives

    @property
    def summary(self) -> str:
        """The share of the largest owner, and the weights that are gathered at once, for the plan."""
        if self.weights is None:
            return self.owners.balance
        blocks, most = len(self.weights.units) - 1, self.weights.most_gathered
        found = f"{self.owners.balance}; {blocks} blocks are gathered one after the other, at most "
        return f"{found}{most / 2**20:,.0f} of {sum(self.owners.load) / 2**20:,.0f} MiB at once"

    def share_gradients(self, is_trace: bool = False) -> None:
        """Let every rank get all summed gradients in `.grad`, for a loop or a listener that reads them.

        Args:
            is_trace: Whether lanes are looked into, which reads also weights.

        Raises:
            TaskError: Weights are sharded as well.
        """
        if is_trace and self.weights is not None:
            raise TaskError("distributed.shard: weights: a trace reads all weights in every lane: set shard: optimizer")
        self.sums.shares = True

    def with_all_weights(self, function: Callable[[int], None]) -> Callable[[int], None]:
        """Return a function that calls the given one while every rank has all weights."""
        weights = self.weights
        if weights is None:
            return function

        def called(step: int) -> None:
            with weights.everywhere():
                function(step)

        return called

    @contextmanager
    def stepping(
        self, inner: Callable[[], AbstractContextManager[None]], optimizers: Sequence[Optimizer]
    ) -> Iterator[None]:
        """Return what is entered around the optimizers' steps.

        Optimizers pass over parameters without a gradient, so they need not know about owners.

        Args:
            inner: Entered as well.
            optimizers: Those that step. Weights that they do not change are not written: graphs that read them stay
                valid.
        """
        changed = self._changed(optimizers)
        theirs = [p for p in self.owners.params if p.grad is not None and not self.owners.is_mine(p)]
        grads = [param.grad for param in theirs]
        for param in theirs:
            param.grad = None
        with inner():
            yield
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad
        self.sums.spread_weights(changed)

    def _changed(self, optimizers: Sequence[Optimizer]) -> set[int]:
        """Return the `id` of each parameter that they may change; the same on all ranks."""
        return {
            id(param)
            for optimizer in optimizers
            for param in params_of(optimizer)
            if self.owners.has(param) and (self._has_gradient(param) or not _needs_gradients(optimizer))
        }

    def _has_gradient(self, param: Parameter) -> bool:
        return param.grad is not None if self.sums.shares else self.sums.is_used(param)

    def norm(self, params: Sequence[Parameter]) -> Tensor:
        """Return the norm of all gradients, to the bit what a rank that has them all would compute."""
        if self.sums.shares:
            return get_total_norm([param.grad for param in params if param.grad is not None])
        used = [param for param in params if self.sums.is_used(param)]
        device = params[0].device
        each = torch.zeros(len(used), dtype=torch.float64, device=device)
        kinds: dict[torch.dtype, list[int]] = {}
        for at, param in enumerate(used):
            if self.owners.is_mine(param):
                kinds.setdefault(param.dtype, []).append(at)
        for places in kinds.values():
            found = torch._foreach_norm([used[at].grad for at in places], 2.0)  # type: ignore[misc]
            each[places] = torch.stack(found).to(each)  # in a wider type, which loses nothing
        sent = each.to(self._collectives.wire(device))
        with self._collectives.activity.waiting("norms"):
            dist.all_reduce(sent)  # one rank has each of them, and x + 0 is x
        return _joined(sent.to(device), used)


def _needs_gradients(optimizer: Optimizer) -> bool:
    """Return whether an optimizer leaves parameters without a gradient alone, as torch's own do."""
    return type(optimizer).step.__module__.startswith("torch.optim.")


def _joined(each: Tensor, params: Sequence[Parameter]) -> Tensor:
    """Return the norm of norms as `torch.nn.utils.get_total_norm` computes it, in its order."""
    if not params:
        return torch.zeros((), device=each.device)
    if len({param.dtype for param in params}) == 1:
        one: Tensor = torch.linalg.vector_norm(each.to(params[0].dtype.to_real()), 2.0)
        return one
    kinds = [torch.empty((), dtype=param.dtype) for param in params]
    grouped = _group_tensors_by_device_and_dtype([kinds], with_indices=True)  # type: ignore[list-item]
    order = [index for _, indices in grouped.values() for index in indices]
    values = [each[at].to(params[at].dtype.to_real()) for at in order]
    several: Tensor = torch.linalg.vector_norm(torch.stack(values), 2.0)
    return several
