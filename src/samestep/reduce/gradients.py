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
from samestep.lanes.tree import LaneTree
from samestep.reduce.scaling import Scaling
from samestep.reduce.stats import LaneStats, LocalStats, RankFlags, inverse

Grads = list[Tensor | None]


class GradientSum(ABC):
    """Sums gradients over the lanes of one step, on all ranks.

    A step is `begin`, for each lane a forward pass in `forward_scope` and one `backward`,
    `share` before the last of them, then `finish`. Lanes without samples are simply never
    mentioned. Where something else than `backward` ran the lane's backward pass, such as a CUDA
    graph, `take` takes what that left in `.grad`.
    """

    def __init__(self, scaling: Scaling, keeps_places: bool = False) -> None:
        """Args:
        scaling: The last factor of the sum.
        keeps_places: Whether the sum must be in the same memory in every step, for a CUDA
            graph to find it there.
        """
        self.scaling = scaling
        self._keeps_places = keeps_places

    @property
    def is_final_after_backward(self) -> bool:
        """Whether a backward pass leaves the step's gradients, with nothing left to be done."""
        return False

    def move_to(self, places: Grads) -> None:
        """From now on leave the gradients in this memory; for `is_final_after_backward` only."""
        raise AssertionError(f"{type(self).__name__} has more than one lane to add up: {places}")

    @abstractmethod
    def begin(self, ragged: bool) -> None:
        """A new step; `ragged` if some rank has no samples in it (the same on every rank)."""

    def forward_scope(self, last: bool) -> AbstractContextManager[None]:
        """Around a lane's forward pass; `last` is this rank's last lane in the step."""
        return nullcontext()

    @abstractmethod
    def share(self, lanes: Sequence[LaneStats], flags: RankFlags) -> LocalStats:
        """Send this rank's lanes' losses, and its flags, to all ranks; before the last `backward`."""

    def start(self, loss: Tensor, count: Tensor | float) -> Tensor | None:
        """What a lane's backpropagation starts from; None for 1."""
        return self.scaling.start

    @abstractmethod
    def backward(self, loss: Tensor, count: Tensor | float, lane: int, last: bool) -> None:
        """Backpropagate one lane's summed loss and take the gradients."""

    @abstractmethod
    def take(self, lane: int, last: bool) -> None:
        """Take what a lane's backward pass has left in `.grad`."""

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
        self._places: list[Grads] = []
        """With `in_places`: the memory of the tree's open nodes, by depth."""

    def collect(self, lane: int, may_vary: bool, in_places: bool = False) -> None:
        """Take the gradients of a lane's backward pass.

        `in_places` copies what later lanes are added to into separate memory: the next
        lane's backward pass overwrites it, and the sum must stay at the same address.
        """
        grads: Grads = [param.grad for param in self.params]
        self.clear_grads()
        used = [grad is not None for grad in grads]
        if self.used is not None and not may_vary:
            self.check_used(used, f"in lane {lane}")
        self.used = used
        self._skip_to(lane)
        if in_places and (lane == self._lanes.start or lane % 2 == 0):
            grads = self._in_place(grads, depth=len(self._tree.nodes))
        self._tree.push(lane, 1, grads)
        self._next = lane + 1

    def _in_place(self, grads: Grads, depth: int) -> Grads:
        if depth == len(self._places):
            self._places.append([None if g is None else torch.empty_like(g) for g in grads])
        return copied(grads, self._places[depth])

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


def copied(grads: Grads, places: Grads) -> Grads:
    """The gradients in memory of their own; a parameter may have none, now or then."""
    found: Grads = []
    for grad, place in zip(grads, places, strict=True):
        found.append(torch.empty_like(grad) if grad is not None and place is None else place)
    both = [(p, g) for p, g in zip(found, grads, strict=True) if p is not None and g is not None]
    torch._foreach_copy_([place for place, _ in both], [grad for _, grad in both])
    return [None if grad is None else place for place, grad in zip(found, grads, strict=True)]


class OneLaneSum(GradientSum):
    """The sum when there is one lane in all: its count is the whole count, known beforehand."""

    def __init__(
        self, params: Sequence[tuple[str, Parameter]], scaling: Scaling, keeps_places: bool = False
    ) -> None:
        super().__init__(scaling, keeps_places)
        self._params = [param for _, param in params]
        self._places: Grads | None = None
        """Where a CUDA graph of the update looks for the gradients."""
        self._last_start: tuple[tuple[float, torch.dtype, torch.device], Tensor] | None = None

    @property
    def is_final_after_backward(self) -> bool:
        return not self.scaling.checks

    def move_to(self, places: Grads) -> None:
        self._places = places

    def begin(self, ragged: bool) -> None:
        for param in self._params:
            param.grad = None

    def share(self, lanes: Sequence[LaneStats], flags: RankFlags) -> LocalStats:
        return LocalStats(lanes, flags)

    def backward(self, loss: Tensor, count: Tensor | float, lane: int, last: bool) -> None:
        loss.backward(self.start(loss, count))
        if self._places is not None:
            self.take(lane, last)

    def take(self, lane: int, last: bool) -> None:
        grads: Grads = [param.grad for param in self._params]
        if self._places is None:
            self._places = grads  # a graph's own memory, which it fills at each replay
        elif any(grad is not place for grad, place in zip(grads, self._places, strict=True)):
            self._places = copied(grads, self._places)
            for param, grad in zip(self._params, self._places, strict=True):
                param.grad = grad

    def start(self, loss: Tensor, count: Tensor | float) -> Tensor:
        # 1 / count instead of 1: no pass over the gradients.
        if self.scaling.start is not None:
            return self.scaling.start
        if isinstance(count, Tensor):
            return torch.as_tensor(inverse(count, loss.device)).to(loss)
        key = (count, loss.dtype, loss.device)
        if self._last_start is None or self._last_start[0] != key:
            self._last_start = key, loss.new_full((), 1.0 / count if count else 0.0)
        return self._last_start[1]

    def finish(self, stats: LocalStats) -> None:
        if self.scaling.checks:
            done = self.scaling.start is None
            factor = 1.0 if done else inverse(stats.count(), self._params[0].device)
            self.scaling.apply([param.grad for param in self._params], factor)


class LaneSum(GradientSum):
    """The sum in a world of one: the tree over all lanes, in place."""

    def __init__(
        self,
        params: Sequence[tuple[str, Parameter]],
        lanes: range,
        find_unused: bool,
        scaling: Scaling,
        keeps_places: bool = False,
    ) -> None:
        super().__init__(scaling, keeps_places)
        names = [name for name, _ in params]
        self._bucket = LaneBucket(names, [param for _, param in params], lanes)
        self._find_unused = find_unused

    def begin(self, ragged: bool) -> None:
        self._bucket.clear_grads()

    def share(self, lanes: Sequence[LaneStats], flags: RankFlags) -> LocalStats:
        return LocalStats(lanes, flags)

    def backward(self, loss: Tensor, count: Tensor | float, lane: int, last: bool) -> None:
        loss.backward(self.scaling.start)
        self.take(lane, last)

    def take(self, lane: int, last: bool) -> None:
        self._bucket.collect(lane, self._find_unused, self._keeps_places)

    def finish(self, stats: LocalStats) -> None:
        grads = self._bucket.total()
        self.scaling.apply(grads, inverse(stats.count(), self._bucket.params[0].device))
        for param, grad in zip(self._bucket.params, grads, strict=True):
            param.grad = grad
