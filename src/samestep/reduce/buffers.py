"""Buffers that forward changes, such as BatchNorm's statistics: averaged over the lanes.

Every lane starts from the step's buffers and changes them as if it were alone. The step's
new buffers are the old ones plus the mean of the lanes' changes, summed in the tree's
order. Buffers that no state dict holds are taken for constants and left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from samestep.distributed.collectives import Collectives
from samestep.lanes.tree import LaneTree, aligned_blocks
from samestep.reduce.exchange import NOTHING, Pending, create_exchange

Changes = list[Tensor] | None


def changing_buffers(modules: Sequence[nn.Module]) -> list[Tensor]:
    """The buffers of these modules that belong to their state and hold numbers."""
    found: dict[int, Tensor] = {}
    for module in modules:
        kept = module.state_dict(keep_vars=True)
        for name, buffer in module.named_buffers():
            if name in kept and buffer.dtype != torch.bool:
                found[id(buffer)] = buffer
    return list(found.values())


@contextmanager
def keep_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Leave buffers as they were before."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, old in zip(buffers, before, strict=True):
                buffer.copy_(old)


class LaneBuffers:
    """Gives every lane the step's buffers and averages what the lanes made of them."""

    def __init__(
        self, buffers: Sequence[Tensor], assignment: Sequence[range], collectives: Collectives
    ) -> None:
        # One lane in all changes the buffers in place: the mean over one lane is that lane.
        alone = sum(map(len, assignment)) == 1
        self._activity = collectives.activity
        self._buffers = [] if alone else list(buffers)
        self._lanes = assignment[collectives.rank]
        self._next = self._lanes.start
        self._touched = False
        self._tree: LaneTree[Changes] = LaneTree(_add_changes)
        if not self._buffers:
            return
        self._base = [buffer.clone() for buffer in self._buffers]
        wide = any(buffer.dtype == torch.float64 for buffer in self._buffers)
        like = self._buffers[0].new_empty(0, dtype=torch.float64 if wide else torch.float32)
        self._one = like.new_ones(1)
        numel = sum(buffer.numel() for buffer in self._buffers) + 1
        blocks = [aligned_blocks(lanes) for lanes in assignment]
        self._exchange = create_exchange(blocks, collectives, numel, like)
        self._steps: Iterator[Pending] = iter(())
        self._pending: Pending | None = None

    def begin_step(self) -> None:
        self._touched = False
        if self._buffers:
            torch._foreach_copy_(self._base, self._buffers)

    def enter_lane(self) -> None:
        if self._buffers and self._touched:
            torch._foreach_copy_(self._buffers, self._base)
        self._touched = True

    def leave_lane(self, lane: int) -> None:
        """After the lane's forward pass: take its changes."""
        if self._buffers:
            self._skip_to(lane)
            self._tree.push(lane, 1, [*torch._foreach_sub(self._buffers, self._base), self._one])
            self._next = lane + 1

    def start(self) -> None:
        """After this rank's last lane: begin the exchange, behind the backward pass."""
        if not self._buffers:
            return
        self._skip_to(self._lanes.stop)
        self._next = self._lanes.start
        for row, changes in zip(self._exchange.rows, self._tree.nodes, strict=True):
            row.fill_(NOTHING)
            if changes is not None:
                pieces = [change.flatten().to(row) for change in changes]
                torch.cat(pieces, out=row[: sum(piece.numel() for piece in pieces)])
        self._tree.clear()
        with self._activity.waiting("buffers"):
            self._steps = self._exchange.start()
            self._pending = next(self._steps, None)

    def finish(self) -> None:
        """Put the step's new buffers in place."""
        if not self._buffers:
            return
        with self._activity.waiting("buffers"):
            while self._pending is not None:
                self._pending.wait()
                self._pending = next(self._steps, None)
        sizes = [*(buffer.numel() for buffer in self._buffers), 1]
        total = self._exchange.total
        *sums, lanes = total[: sum(sizes)].split(sizes)
        for buffer, base, change in zip(self._buffers, self._base, sums, strict=True):
            mean = (change / lanes.clamp(min=1)).view(buffer.shape)
            if not buffer.dtype.is_floating_point:
                mean = mean.round()
            buffer.copy_(base + mean.to(buffer.dtype))

    def _skip_to(self, lane: int) -> None:
        for empty in range(self._next, lane):
            self._tree.push(empty, 1, None)


def _add_changes(left: Changes, right: Changes) -> Changes:
    if left is None or right is None:
        return right if left is None else left
    return list(torch._foreach_add(left, right))
