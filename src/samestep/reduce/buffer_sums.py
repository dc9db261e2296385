"""Buffers whose lanes are added up: the step's new ones are the old ones and the lanes' changes.

One arithmetic for every type, within a rank and between ranks: numbers change in float64, integers
exactly, and a flag is set if a lane has set it. All of them travel in one row of float64: an integer
as two halves, whose sums are exact for up to 2^14 lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from samestep.distributed.collectives import Collectives
from samestep.errors import TaskError
from samestep.lanes.tree import LaneTree, aligned_blocks
from samestep.reduce.buffer_slots import BufferSlot, current
from samestep.reduce.exchange import NOTHING, Pending, create_exchange

_HALF = 26
_LOW = (1 << _HALF) - 1


class _Kind:
    """The buffers of one kind of numbers, side by side in flat memory of one type."""

    def __init__(self, places: Sequence[int], pairs: Sequence[tuple[BufferSlot, Tensor]], wide: torch.dtype) -> None:
        # Complex ones first: their views need even offsets.
        self._places = sorted(places, key=lambda place: not pairs[place][1].is_complex())
        self.slots = [pairs[place][0] for place in self._places]
        self.tensors = [pairs[place][1] for place in self._places]
        sizes = [t.numel() * (2 if t.is_complex() else 1) for t in self.tensors]
        self._sizes = sizes
        self.numel = sum(sizes)
        like = self.tensors[0] if self.tensors else torch.empty(0)
        self.base = torch.zeros(self.numel, dtype=wide, device=like.device)
        self.now = torch.zeros_like(self.base)
        self.views = [_shaped(part, tensor) for part, tensor in zip(self.now.split(sizes), self.tensors, strict=True)]
        summed = [slot.join == "sum" for slot in self.slots]
        self.is_summed = None
        """Where lanes are added up and not averaged; None if nowhere."""
        if any(summed):
            marks = torch.tensor(summed).repeat_interleave(torch.tensor(sizes))
            self.is_summed = marks.to(like.device)

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Into `now`."""
        if not self.views:
            return
        try:
            torch._foreach_copy_(self.views, list(tensors))
        except RuntimeError:
            self._refuse_other_shapes(tensors)
            raise

    def _refuse_other_shapes(self, tensors: Sequence[Tensor]) -> None:
        for slot, view, tensor in zip(self.slots, self.views, tensors, strict=True):
            if tensor.shape != view.shape:
                raise TaskError(
                    f"the buffer {slot.path} had the shape {tuple(view.shape)} when the run was prepared, and "
                    f"the forward pass gave it {tuple(tensor.shape)}, as observers of quantization-aware "
                    "training do with their first batch: lanes cannot be joined then. Put a batch through the "
                    "model before run.prepare"
                ) from None

    def stacked(self, lanes: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return what several lanes made of all buffers, those of this kind in a row for each lane."""
        rows = self.base.new_empty(len(lanes), self.numel)
        views: list[Tensor] = []
        for row in rows:
            parts = zip(row.split(self._sizes), self.tensors, strict=True)
            views += [_shaped(part, tensor) for part, tensor in parts]
        if views:
            torch._foreach_copy_(views, [lane[place] for lane in lanes for place in self._places])
        return rows

    def write(self) -> None:
        """Write `now` into the buffers."""
        if self.views:
            torch._foreach_copy_(self.tensors, self.views)


def _shaped(part: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        return part.view(torch.complex128).view(like.shape)
    return part.view(like.shape)


class BufferSums:
    """Sums the changes of some buffers over the lanes of all ranks, in the tree's order."""

    def __init__(
        self,
        slots: Sequence[BufferSlot],
        tensors: Sequence[Tensor],
        assignment: Sequence[range],
        collectives: Collectives,
    ) -> None:
        pairs = list(zip(slots, tensors, strict=True))
        self._numbers = _kind(pairs, lambda t: t.is_floating_point() or t.is_complex())
        self._integers = _kind(pairs, _is_integer, torch.int64)
        self._flags = _kind(pairs, lambda t: t.dtype == torch.bool)
        self._activity = collectives.activity
        self._lanes = assignment[collectives.rank]
        self._next = self._lanes.start
        self._tree: LaneTree[Tensor | None] = LaneTree(self._add)
        self._free: list[Tensor] = []
        """Rows that no node of the tree is in; there are never more than the tree is deep."""
        sizes = (self._numbers.numel, self._integers.numel, self._integers.numel, self._flags.numel)
        self._sizes = (*sizes, 1)
        self._like = tensors[0].new_empty(0, dtype=torch.float64)
        blocks = [aligned_blocks(lanes) for lanes in assignment]
        self._exchange = create_exchange(blocks, collectives, sum(self._sizes), self._like)
        self._steps: Iterator[Pending] = iter(())
        self._pending: Pending | None = None

    @property
    def _kinds(self) -> tuple[_Kind, _Kind, _Kind]:
        return self._numbers, self._integers, self._flags

    def begin_step(self) -> None:
        for kind in self._kinds:
            kind.read(kind.tensors)
            kind.base.copy_(kind.now)
        # What is not finite has no change; its new value counts, as if it had been 0.
        torch.nan_to_num(self._numbers.base, 0.0, 0.0, 0.0, out=self._numbers.base)

    def leave_lane(self, lane: int) -> None:
        """Take what the lane made of the buffers, from wherever the modules hold them."""
        for kind in self._kinds:
            kind.read([current(*pair) for pair in zip(kind.slots, kind.tensors, strict=True)])
        row = self._free.pop() if self._free else self._like.new_empty(sum(self._sizes))
        numbers, high, low, flags, count = row.split(self._sizes)
        torch.sub(self._numbers.now, self._numbers.base, out=numbers)
        if self._integers.numel:
            change = self._integers.now - self._integers.base
            high.copy_(change >> _HALF)
            low.copy_(change & _LOW)
        flags.copy_(self._flags.now)
        count.fill_(1.0)
        self._skip_to(lane)
        self._tree.push(lane, 1, row)
        self._next = lane + self._lanes.step

    def close_lanes(self) -> None:
        """After this rank's last lane: put what they add up to where the ranks exchange it."""
        self._skip_to(self._lanes.stop)
        self._next = self._lanes.start
        self._write_rows(self._tree.nodes)
        self._free += [row for row in self._tree.nodes if row is not None]
        self._tree.clear()

    def _write_rows(self, nodes: Sequence[Tensor | None]) -> None:
        for place, row in zip(self._exchange.rows, nodes, strict=True):
            place.fill_(NOTHING)
            if row is not None:
                place[: row.numel()].copy_(row)

    def record(self, lanes: Mapping[int, Sequence[Tensor]]) -> None:
        """`leave_lane` of all of this rank's lanes, and `close_lanes`, in few kernels.

        Args:
            lanes: What each lane made of the buffers, in the order of the tensors.
        """
        rows = self._like.new_empty(len(lanes), sum(self._sizes))
        numbers, high, low, flags, count = rows.split(self._sizes, dim=1)
        torch.sub(self._numbers.stacked(list(lanes.values())), self._numbers.base, out=numbers)
        if self._integers.numel:
            change = self._integers.stacked(list(lanes.values())) - self._integers.base
            high.copy_(change >> _HALF)
            low.copy_(change & _LOW)
        flags.copy_(self._flags.stacked(list(lanes.values())))
        count.fill_(1.0)
        tree: LaneTree[Tensor | None] = LaneTree(_add_in_place)
        by_lane = dict(zip(lanes, rows, strict=True))
        for lane in self._lanes:
            tree.push(lane, 1, by_lane.get(lane))
        self._write_rows(tree.nodes)

    def start(self) -> None:
        """Begin the exchange."""
        with self._activity.waiting("buffers"):
            self._steps = self._exchange.start()
            self._pending = next(self._steps, None)

    def wait(self) -> None:
        """End the exchange."""
        with self._activity.waiting("buffers"):
            while self._pending is not None:
                self._pending.wait()
                self._pending = next(self._steps, None)

    def finish(self) -> None:
        """Put the step's new buffers in place."""
        numbers, high, low, flags, count = self._total()
        lanes = count.clamp(min=1)
        self._write_numbers(numbers, lanes)
        self._write_integers((high.to(torch.int64) << _HALF) + low.to(torch.int64), lanes)
        if self._flags.numel:
            # Without any lane the flags stay what they were.
            set_now = torch.where(count > 0, flags > 0, self._flags.base > 0)
            self._flags.now.copy_(set_now)
            self._flags.write()

    def _total(self) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = self._exchange.total[: sum(self._sizes)].split(self._sizes)
        return parts

    def _write_numbers(self, changes: Tensor, lanes: Tensor) -> None:
        kind = self._numbers
        if not kind.numel:
            return
        divisor = lanes
        if kind.is_summed is not None:
            divisor = torch.where(kind.is_summed, torch.ones_like(lanes), lanes)
        torch.div(changes, divisor, out=kind.now)
        kind.now.add_(kind.base)
        kind.write()

    def _write_integers(self, changes: Tensor, lanes: Tensor) -> None:
        kind = self._integers
        if not kind.numel:
            return
        mean = _rounded_quotient(changes, lanes.to(torch.int64))
        if kind.is_summed is not None:
            mean = torch.where(kind.is_summed, changes, mean)
        torch.add(kind.base, mean, out=kind.now)
        kind.write()

    def _add(self, left: Tensor | None, right: Tensor | None) -> Tensor | None:
        if left is not None and right is not None:
            self._free.append(right)
        return _add_in_place(left, right)

    def _skip_to(self, lane: int) -> None:
        for empty in range(self._next, lane, self._lanes.step):
            self._tree.push(empty, 1, None)


def _add_in_place(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)


def _kind(
    pairs: Sequence[tuple[BufferSlot, Tensor]], belongs: Callable[[Tensor], bool], wide: torch.dtype = torch.float64
) -> _Kind:
    return _Kind([at for at, (_, tensor) in enumerate(pairs) if belongs(tensor)], pairs, wide)


def _is_integer(tensor: Tensor) -> bool:
    return tensor.dtype != torch.bool and not tensor.is_floating_point() and not tensor.is_complex()


def _rounded_quotient(values: Tensor, divisor: Tensor) -> Tensor:
    """Return the nearest integer, and of two the even one."""
    below = values.div(divisor, rounding_mode="floor")
    twice = 2 * (values - below * divisor)
    up = (twice > divisor) | ((twice == divisor) & (below % 2 == 1))
    return below + up
