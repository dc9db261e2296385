"""Parameters whose gradients go to their owners together (`distributed.shard`), and the memory that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.distributed.collectives import TorchCollectives
from samestep.lanes.tree import aligned_blocks
from samestep.reduce.exchange import NOTHING, Message, Pending, additions, receive, send, start_exchange
from samestep.reduce.gradients import Grads
from samestep.reduce.owners import Owners
from samestep.reduce.scaling import Scaling
from samestep.reduce.tree_sum import ALIGN, FIRST_BUCKET_BYTES, Bucket, Named, view_of

_WORTH_SLICES = 1.5
"""How much less a rank must receive at most for a bucket to go by slices, which takes one more message."""
_LEAST_BYTES = FIRST_BUCKET_BYTES
"""A smaller bucket goes straight to owners: it takes as long as a message takes, whatever its size."""

Blocks = list[list[tuple[int, int]]]
"""The blocks of lanes that each rank adds up by itself."""


class OwnedBucket(Bucket):
    """Parameters of one dtype, laid out owner by owner."""

    def __init__(
        self, named: Named, assignment: Sequence[range], collectives: TorchCollectives, owners: Owners
    ) -> None:
        super().__init__(named, assignment[collectives.rank])
        self.rank, self._world, self._collectives = collectives.rank, collectives.world, collectives
        self.blocks = self._blocks(assignment)
        self.wire = collectives.wire(self.params[0].device)
        self.seen = [False] * len(self.params)
        """Which parameters had a gradient in this step, on this rank."""
        self._mine = [owners.is_mine(param) for param in self.params]
        self._strides = [owners.stride(param) for param in self.params]
        self._offsets = [0] * len(self.params)
        self.parts: list[slice] = []
        """The place of each owner's parameters."""
        end = 0
        for owner in range(self._world):
            start = end
            for at, param in enumerate(self.params):
                if owners.of(param) == owner:
                    self._offsets[at] = end
                    end += -(-self.width * param.numel() // ALIGN) * ALIGN
            self.parts.append(slice(start, end))
        self.numel = end
        self.goes_by_slices = self._is_uneven()
        """Whether ranks add up even slices before owners get them."""
        self.added = self._even_slices() if self.goes_by_slices else self.parts
        """The place that each rank adds up."""
        self.own = _length(self.added[self.rank])
        self._total = self.like.new_zeros(_length(self.parts[self.rank]))
        self._passing: list[Message] = []
        """What brings what ranks have added up to its owners."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        """What is copied then, and where to."""

    def _blocks(self, assignment: Sequence[range]) -> Blocks:
        return [aligned_blocks(lanes) for lanes in assignment]

    def _is_uneven(self) -> bool:
        """Return whether an owner would receive much more than a rank that gets an even slice from each."""
        if self.numel * self.like.element_size() < _LEAST_BYTES:
            return False
        largest = max(map(_length, self.parts))
        others = sum(map(len, self.blocks)) * (self._world - 1) / self._world
        return largest * others > _WORTH_SLICES * (self.numel / self._world * others + largest)

    def _even_slices(self) -> list[slice]:
        # Of full lines, so that pairs that are complex numbers stay together.
        size = -(-self.numel // (self._world * ALIGN)) * ALIGN
        ends = [min(rank * size, self.numel) for rank in range(self._world + 1)]
        return [slice(start, stop) for start, stop in pairwise(ends)]

    @property
    def held(self) -> int:
        """Numbers of this rank's parameters."""
        return self._total.numel()

    def take_memory(self, memory: Memory) -> None:
        """Take the memory that this bucket is sent and received in."""
        own, count = self.own, len(self.blocks[self.rank])
        self._memory = memory
        self._rows = memory.rows[:count, : self.numel]
        self._sent = memory.sent[:count, : self.numel]
        places = list(zip(self._offsets, self.params, self._strides, strict=True))
        self._views = [[view_of(row, *place) for place in places] for row in self._rows]
        first = self.parts[self.rank].start
        self._sums = [
            view_of(self._total, at - first, param, stride) if mine else None
            for (at, param, stride), mine in zip(places, self._mine, strict=True)
        ]
        arriving = memory.arriving[:, :own]
        held = [block for blocks in self.blocks for block in blocks]
        starts = [sum(map(len, self.blocks[:rank])) for rank in range(self._world)]
        others = [(self.rank + distance) % self._world for distance in range(1, self._world)]
        self._gather: list[Message] = []
        if own:
            self._gather += receive(
                (peer, arriving[starts[peer] + at]) for peer in others for at in range(len(self.blocks[peer]))
            )
        self._gather += send(
            (peer, row[self.added[peer]]) for peer in others for row in self._sent if _length(self.added[peer])
        )
        self._spread = receive((peer, self._sent[0][self.parts[peer]]) for peer in others if _length(self.parts[peer]))
        mine = self._sent[0][self.parts[self.rank]]
        if mine.numel():
            self._spread += send((peer, mine) for peer in others)
        self._mine_in = arriving[starts[self.rank] : starts[self.rank] + count]
        self._additions = additions(arriving, held) if own else []
        self._lay_out(arriving, memory)

    def _lay_out(self, arriving: Tensor, memory: Memory) -> None:
        """Take the memory in which lanes are added up."""
        if self.goes_by_slices:
            self._pass_on(arriving[0], memory.passed[: self.held])
        elif self.held:
            self._copies = [(self._total, arriving[0])]

    def _pass_on(self, summed: Tensor, passed: Tensor) -> None:
        """Lay out how owners get what ranks have added up."""
        if passed.device == self._total.device:
            passed = self._total
        here, mine = self.added[self.rank], self.parts[self.rank]
        for peer in range(self._world):
            found = _overlap(self.added[peer], mine)
            given = summed[_within(_overlap(here, self.parts[peer]), here)]
            if peer == self.rank:
                self._copies += [(passed[_within(found, mine)], given)] if given.numel() else []
                continue
            if _length(found):
                self._passing += receive([(peer, passed[_within(found, mine)])])
            if given.numel():
                self._passing += send([(peer, given)])
        if passed is not self._total and self._total.numel():
            self._copies.append((self._total, passed))

    # -- sums to their owners --------------------------------------------------------------

    def collect(self, lane: int, may_vary: bool) -> None:
        here = (param.grad is not None for param in self.params)
        self.seen = [seen or now for seen, now in zip(self.seen, here, strict=True)]
        super().collect(lane, may_vary)

    def take_recorded(self, blocks: Sequence[Grads]) -> None:
        """Take what a replay has left of each block of this rank's lanes."""
        self.seen = [grad is not None for grad in blocks[0]]
        if self.used is not None:
            self.check_used(self.seen, "as a CUDA graph")
        self.take_blocks(blocks)

    def send(self, with_usage: bool) -> None:
        self._memory.lend(self)
        for row, views, grads in zip(self._rows, self._views, self.close(), strict=True):
            row.fill_(NOTHING)  # also between parameters, which is checked, too
            self._write(views, grads)
        self._put_on_wire()
        self.start(self._sum())

    def _sum(self) -> Iterator[Pending]:
        pending = start_exchange(self._gather)
        self._mine_in.copy_(self._sent[:, self.added[self.rank]])
        yield pending
        for left, right in self._additions:
            left.add_(right)
        yield from self._to_owners()

    def _to_owners(self, tag: int = 0) -> Iterator[Pending]:
        if self._passing:
            yield start_exchange(self._passing, tag, self._collectives.group("gradients"))
        for place, value in self._copies:
            place.copy_(value)

    def agree_on_usage(self, may_vary: bool) -> None:
        raise AssertionError("agreed on for all buckets at once")

    def agree(self, everywhere: list[bool], may_vary: bool) -> None:
        """Take which parameters took part in a lane of any rank."""
        if self.used is not None and not may_vary:
            self.check_used(everywhere, "on another rank")
        self.used, self.seen = everywhere, [False] * len(self.params)

    def deliver(self, scaling: Scaling, inverse_count: Tensor | float, lends: bool) -> None:
        assert self.used is not None, "agreed on in the first step"
        self.clear_grads()
        if not self._total.numel():
            return
        scaling.apply([self._total], inverse_count)
        for param, total, used in zip(self.params, self._sums, self.used, strict=True):
            if total is not None and used:
                param.grad = total if lends else total.clone()

    # -- from owners to all ranks ----------------------------------------------------------

    def allocate_others(self) -> None:
        """Allocate the gradients of the step that other ranks own."""
        assert self.used is not None, "agreed on in the first step"
        for param, stride, mine, used in zip(self.params, self._strides, self._mine, self.used, strict=True):
            if used and not mine:
                param.grad = torch.empty_strided(param.shape, stride, dtype=param.dtype, device=param.device)

    def begin_spread(self, value: Callable[[Parameter], Tensor | None]) -> None:
        """Send a value of each own parameter to all ranks."""
        own = [value(param) if mine else None for param, mine in zip(self.params, self._mine, strict=True)]
        self._write(self._views[0], own)
        self._put_on_wire()
        self._pending = start_exchange(self._spread)

    def end_spread(self, value: Callable[[Parameter], Tensor | None]) -> None:
        """Wait for the values of other owners, and put them where they belong."""
        assert self._pending is not None, "sent before"
        self._pending.wait()
        self._pending = None
        if self._sent is not self._rows:
            self._rows[0].copy_(self._sent[0])
        theirs = [
            (place, view)
            for param, view, mine in zip(self.params, self._views[0], self._mine, strict=True)
            if not mine and (place := value(param)) is not None
        ]
        if theirs:
            torch._foreach_copy_([place for place, _ in theirs], [view for _, view in theirs])

    def _put_on_wire(self) -> None:
        if self._sent.data_ptr() != self._rows.data_ptr():
            self._sent.copy_(self._rows)

    def _write(self, views: Sequence[Tensor], values: Grads) -> None:
        present = [(view, v) for view, v in zip(views, values, strict=True) if v is not None]
        if present:
            torch._foreach_copy_([view for view, _ in present], [v for _, v in present])


class Memory:
    """Memory in which buckets of one dtype are sent and received, one after the other."""

    def __init__(self, buckets: Sequence[OwnedBucket]) -> None:
        first = buckets[0]
        blocks = sum(map(len, first.blocks))
        mine = len(first.blocks[first.rank])
        numel = max(bucket.numel for bucket in buckets)
        own = max(bucket.own for bucket in buckets)
        self._user = first
        self.rows = first.like.new_zeros(max(1, mine), numel)
        is_on_wire = first.like.device.type == first.wire.type
        self.sent = self.rows if is_on_wire else torch.zeros_like(self.rows, device=first.wire)
        self.arriving = first.like.new_zeros(blocks, own, device=first.wire)
        sliced = () if is_on_wire else (bucket for bucket in buckets if bucket.goes_by_slices)
        passed = max((bucket.held for bucket in sliced), default=0)
        self.passed = first.like.new_zeros(passed, device=first.wire)

    def lend(self, bucket: OwnedBucket) -> None:
        """Let a bucket use it, once the one before is through."""
        self._user.wait()
        self._user = bucket


def _length(place: slice) -> int:
    return int(place.stop - place.start)


def _overlap(one: slice, other: slice) -> slice:
    start = max(one.start, other.start)
    return slice(start, max(start, min(one.stop, other.stop)))


def _within(part: slice, whole: slice) -> slice:
    """Return where a part is, counted from the beginning of the whole."""
    return slice(part.start - whole.start, part.stop - whole.start) if _length(part) else slice(0, 0)
