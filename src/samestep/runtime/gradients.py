"""Adds up what the lanes' backward passes leave in `.grad`: the lower part of the tree.

One process drives every lane, so its sum is the whole sum. `tree.py` adds the exchange
between ranks, `ddp.py` is the sum by DistributedDataParallel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.errors import TaskError
from samestep.plan import LaneTree
from samestep.runtime.lanestats import LaneStats, LocalStats, RankNote, inverse

Grads = list[Tensor | None]


class GradientSum(ABC):
    """Sums gradients over the lanes of one step, on all ranks.

    A step is `begin`, for each lane a forward pass in `forward_scope` and one `backward`,
    `share` before the last of them, then `finish`. Lanes without samples are simply never mentioned.
    """

    @abstractmethod
    def begin(self, ragged: bool) -> None:
        """A new step; `ragged` if some rank has no samples in it (the same on every rank)."""

    def forward_scope(self, last: bool) -> AbstractContextManager[None]:
        """Around a lane's forward pass; `last` is this rank's last lane in the step."""
        return nullcontext()

    @abstractmethod
    def share(self, lanes: Sequence[LaneStats], note: RankNote) -> LocalStats:
        """Tell all ranks this rank's lanes' losses, and its note; before the last `backward`."""

    @abstractmethod
    def backward(self, loss: Tensor, count: Tensor | float, lane: int, last: bool) -> None:
        """Backpropagate one lane's summed loss and take the gradients."""

    @abstractmethod
    def finish(self, stats: LocalStats) -> None:
        """Leave the sum over all lanes of all ranks, over their whole count, in `.grad`."""


class LaneBucket:
    """Some parameters, and the tree of what this rank's lanes gave them."""

    def __init__(self, names: Sequence[str], params: Sequence[Parameter], lanes: range) -> None:
        self.params = list(params)
        self.used: list[bool] | None = None
        """Which parameters take part in a lane; None before the first."""
        self._names = names
        self._lanes = lanes
        self._next = lanes.start
        self._tree: LaneTree[Grads] = LaneTree(_add_grads)

    def collect(self, lane: int, may_vary: bool) -> None:
        """Take the gradients of a lane's backward pass."""
        grads: Grads = [param.grad for param in self.params]
        self.clear_grads()
        used = [grad is not None for grad in grads]
        if self.used is not None and not may_vary:
            self.check_used(used, f"in lane {lane}")
        self.used = used
        self._skip_to(lane)
        self._tree.push(lane, 1, grads)
        self._next = lane + 1

    def clear_grads(self) -> None:
        for param in self.params:
            param.grad = None

    def close(self) -> list[Grads]:
        """One list of gradients per block of lanes; then start over."""
        self._skip_to(self._lanes.stop)
        self._next = self._lanes.start
        nodes = self._tree.nodes
        self._tree.clear()
        return nodes

    def total(self) -> Grads:
        """The sum over all lanes, when all lanes are this rank's; then start over."""
        self._skip_to(self._lanes.stop)
        self._next = self._lanes.start
        grads = self._tree.close()
        self._tree.clear()
        return grads

    def _skip_to(self, lane: int) -> None:
        for empty in range(self._next, lane):
            self._tree.push(empty, 1, [None] * len(self.params))

    def check_used(self, used: list[bool], where: str) -> None:
        """Refuse a parameter that takes part here and not elsewhere, or the other way round."""
        for name, now, before in zip(self._names, used, self.used or used, strict=True):
            if now != before:
                raise TaskError(
                    f"parameter {name} {'got a' if now else 'got no'} gradient {where}, unlike in "
                    "the lanes before. If that is meant, set "
                    "distributed.find_unused_parameters: true"
                )


def _add_grads(left: Grads, right: Grads) -> Grads:
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


class OneLaneSum(GradientSum):
    """The sum when there is one lane in all: its count is the whole count, known beforehand."""

    def __init__(self, params: Sequence[tuple[str, Parameter]]) -> None:
        self._params = [param for _, param in params]
        self._last_start: tuple[tuple[float, torch.dtype, torch.device], Tensor] | None = None

    def begin(self, ragged: bool) -> None:
        for param in self._params:
            param.grad = None

    def share(self, lanes: Sequence[LaneStats], note: RankNote) -> LocalStats:
        return LocalStats(lanes, note)

    def backward(self, loss: Tensor, count: Tensor | float, lane: int, last: bool) -> None:
        # Backpropagation starts from 1 / count instead of 1: no pass over the gradients.
        loss.backward(self._start(loss, count))

    def _start(self, loss: Tensor, count: Tensor | float) -> Tensor:
        if isinstance(count, Tensor):
            return torch.as_tensor(inverse(count, loss.device)).to(loss)
        key = (count, loss.dtype, loss.device)
        if self._last_start is None or self._last_start[0] != key:
            self._last_start = key, loss.new_full((), 1.0 / count if count else 0.0)
        return self._last_start[1]

    def finish(self, stats: LocalStats) -> None:
        """Nothing is left to do."""


class LaneSum(GradientSum):
    """The sum in a world of one: the tree over all lanes, in place."""

    def __init__(
        self, params: Sequence[tuple[str, Parameter]], lanes: range, find_unused: bool
    ) -> None:
        names = [name for name, _ in params]
        self._bucket = LaneBucket(names, [param for _, param in params], lanes)
        self._find_unused = find_unused

    def begin(self, ragged: bool) -> None:
        self._bucket.clear_grads()

    def share(self, lanes: Sequence[LaneStats], note: RankNote) -> LocalStats:
        return LocalStats(lanes, note)

    def backward(self, loss: Tensor, count: Tensor | float, lane: int, last: bool) -> None:
        loss.backward()
        self._bucket.collect(lane, self._find_unused)

    def finish(self, stats: LocalStats) -> None:
        grads = self._bucket.total()
        scale_(grads, stats.inverse_count(self._bucket.params[0].device))
        for param, grad in zip(self._bucket.params, grads, strict=True):
            param.grad = grad


def scale_(grads: Sequence[Tensor | None], factor: Tensor | float) -> None:
    present = [grad for grad in grads if grad is not None]
    if present:
        torch._foreach_mul_(present, factor)
