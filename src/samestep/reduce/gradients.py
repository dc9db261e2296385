"""Adds up what the lanes' backward passes leave in `.grad`: the lower part of the tree.

One process drives every lane, so its sum is the whole sum. `tree_sum.py` adds the exchange
between ranks, `ddp.py` is the sum by DistributedDataParallel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.errors import TaskError
from samestep.lanes.tree import LaneTree, aligned_blocks
from samestep.reduce.scaling import Scaling
from samestep.reduce.stats import LaneStats, LocalStats, RankFlags, inverse

Grads = list[Tensor | None]


class RecordedSums(NamedTuple):
    """The sums that a rank's lanes leave behind, if they are replayed as a CUDA graph."""

    blocks: Sequence[Grads]
    """For each block of lanes (`aligned_blocks`), a gradient of each parameter."""
    stats: Sequence[LaneStats]
    """What each of the rank's lanes measured."""


class GradientSum(ABC):
    """Sums gradients over the lanes of one step, on all ranks.

    A step is `begin`, for each lane a forward pass in `forward_scope` and one `backward`,
    `share` before the last of them, then `exchange` and `finish`. Lanes without samples are simply
    never mentioned.

    Lanes that are replayed as a CUDA graph leave their sums elsewhere: `record` is a part of that
    graph, and their step is a replay, `share_recorded`, `exchange` and `finish`. Both kinds of step
    start the same collectives in the same order: one rank may replay while another does not.
    """

    is_local = False
    """Whether all lanes are this process's: there is nothing to exchange."""
    reads_recorded = False
    """Whether `share_recorded` reads what lanes add up to; else `record` has put it where the ranks exchange it."""
    shares_early = True
    """Whether `share` comes before the last `backward`, so that it travels behind it, or after `exchange`."""

    def __init__(self, scaling: Scaling) -> None:
        self.scaling = scaling
        self.usage_varies = False
        """Whether a parameter may have a gradient in one step or lane and none in another."""
        self.ragged = False
        """Whether some rank has no samples in the step: known before its first forward pass."""
        self.in_body = False
        """Whether forward passes came before, in the body of a loop."""
        self.filled: int | None = None
        """Lanes that have samples in the step, of all ranks; None where no rank knows."""
        self.lends = True
        """Whether `.grad` may be memory that the next sum is written to."""

    @property
    def finishes_on_device(self) -> bool:
        """Return whether `finish` is nothing but kernels for the device, which can be captured."""
        return True

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
        """Return what a lane's backpropagation starts from; None for 1."""
        return self.scaling.start

    @abstractmethod
    def backward(self, loss: Tensor, count: Tensor | float, lane: int, last: bool, retain: bool = False) -> None:
        """Backpropagate one lane's summed loss and take the gradients; `retain` keeps its graph."""

    def take(self, lane: int) -> None:
        """Take what is in `.grad` for one lane's, in place of `backward`."""
        raise AssertionError(f"{type(self).__name__} takes no gradients of lanes that meet")

    def record(self, lanes: RecordedSums) -> None:
        """Put what this rank's lanes add up to where the ranks exchange it."""
        return None

    def share_recorded(self, lanes: RecordedSums, flags: RankFlags) -> LocalStats:
        """Instead of `share`, after a replay of what was recorded."""
        raise AssertionError(f"{type(self).__name__} is not recorded")

    def exchange(self) -> None:
        """Bring the sums of all ranks together, and wait for them."""
        return None

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
        self._tree: LaneTree[Grads] = LaneTree(add_grads)

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

    def take_blocks(self, sums: Sequence[Grads]) -> None:
        """Take what blocks of lanes, summed elsewhere, add up to."""
        for (start, size), grads in zip(aligned_blocks(self._lanes), sums, strict=True):
            self._tree.push(start, size, grads)
        self._next = self._lanes.stop

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
        """Return the sum over all lanes, when all lanes are this rank's; then start over."""
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


def add_grads(left: Grads, right: Grads) -> Grads:
    """Return the sum, in the memory of the left ones."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def copied(grads: Grads) -> Grads:
    """Return the gradients in new memory, by few kernels."""
    present = [grad for grad in grads if grad is not None]
    made = iter(torch._foreach_mul(present, 1.0)) if present else iter(())
    return [None if grad is None else next(made) for grad in grads]


class OneLaneSum(GradientSum):
    """The sum when there is one lane in all: its count is the whole count, known beforehand."""

    is_local = reads_recorded = True

    def __init__(self, params: Sequence[tuple[str, Parameter]], scaling: Scaling) -> None:
        super().__init__(scaling)
        self._params = [param for _, param in params]
        self._last_start: tuple[tuple[float, torch.dtype, torch.device], Tensor] | None = None

    def begin(self, ragged: bool) -> None:
        for param in self._params:
            param.grad = None

    def share(self, lanes: Sequence[LaneStats], flags: RankFlags) -> LocalStats:
        return LocalStats(lanes, flags)

    def backward(self, loss: Tensor, count: Tensor | float, lane: int, last: bool, retain: bool = False) -> None:
        loss.backward(self.start(loss, count), retain_graph=retain)

    def share_recorded(self, lanes: RecordedSums, flags: RankFlags) -> LocalStats:
        grads = lanes.blocks[0] if self.lends else copied(lanes.blocks[0])
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = grad
        return LocalStats(lanes.stats, flags)

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

    is_local = reads_recorded = True

    def __init__(
        self, params: Sequence[tuple[str, Parameter]], lanes: range, find_unused: bool, scaling: Scaling
    ) -> None:
        super().__init__(scaling)
        names = [name for name, _ in params]
        self._bucket = LaneBucket(names, [param for _, param in params], lanes)
        self.usage_varies = find_unused

    def begin(self, ragged: bool) -> None:
        self._bucket.clear_grads()

    def share(self, lanes: Sequence[LaneStats], flags: RankFlags) -> LocalStats:
        return LocalStats(lanes, flags)

    def backward(self, loss: Tensor, count: Tensor | float, lane: int, last: bool, retain: bool = False) -> None:
        loss.backward(self.scaling.start, retain_graph=retain)
        self.take(lane)

    def take(self, lane: int) -> None:
        self._bucket.collect(lane, self.usage_varies)

    def share_recorded(self, lanes: RecordedSums, flags: RankFlags) -> LocalStats:
        self._bucket.take_blocks(lanes.blocks if self.lends else [*map(copied, lanes.blocks)])
        return LocalStats(lanes.stats, flags)

    def finish(self, stats: LocalStats) -> None:
        grads = self._bucket.total()
        self.scaling.apply(grads, inverse(stats.count(), self._bucket.params[0].device))
        for param, grad in zip(self._bucket.params, grads, strict=True):
            param.grad = grad
