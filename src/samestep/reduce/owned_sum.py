"""The lane tree with sums that only their owners get (`distributed.shard: optimizer`).

A bucket is laid out owner by owner. Each rank sends every owner its part, and the owner adds what it got
in the tree's order: the additions of `exchange.py`, whose second half, the sum to all ranks, is left out.
After the update the owners send their weights to all ranks, through the same memory. As many bytes are
sent as without owners.

Two buckets are in flight at a time, in memory that all buckets share. What stays is the sum of this rank's
own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from samestep.distributed.collectives import TorchCollectives
from samestep.lanes.tree import aligned_blocks
from samestep.reduce.exchange import (
    NOTHING,
    Message,
    Pending,
    additions,
    receive,
    send,
    start_exchange,
)
from samestep.reduce.gradients import Grads
from samestep.reduce.owners import Owners
from samestep.reduce.scaling import Scaling
from samestep.reduce.stats import LocalStats
from samestep.reduce.tree_sum import (
    ALIGN,
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Bucket,
    Named,
    TreeSum,
    cut_buckets,
    view_of,
)

_IN_FLIGHT = 2
"""Buckets that share memory in turn; as many may wait for other ranks at once."""
_PARTS = 16
"""Buckets that a small model has at least."""


def bucket_bytes(params: Sequence[Tensor]) -> int:
    """Return the bytes after which a bucket ends.

    Two buckets are sent and two received at once: of a small model these would be most of it.

    Args:
        params: All parameters.
    """
    return max(FIRST_BUCKET_BYTES, min(BUCKET_BYTES, sum(p.nbytes for p in params) // _PARTS))


class OwnedSum(TreeSum):
    """Sums the lanes of all ranks in the tree's order, each parameter's on its owner."""

    _buckets: list[OwnedBucket]

    def __init__(
        self,
        params: Named,
        assignment: Sequence[range],
        collectives: TorchCollectives,
        find_unused: bool,
        scaling: Scaling,
        owners: Owners,
    ) -> None:
        self.owners = owners
        self.shares = False
        """Whether every rank gets all sums in `.grad`, for a loop or a listener that reads them."""
        super().__init__(params, assignment, collectives, find_unused, scaling)
        self._places = {
            id(param): (bucket, place)
            for bucket in self._buckets
            for place, param in enumerate(bucket.params)
        }

    def _cut(self, params: Named) -> list[Named]:
        most = bucket_bytes([param for _, param in params])
        return list(cut_buckets(list(reversed(params)), most))

    def _make_buckets(self, chunks: Sequence[Named]) -> list[OwnedBucket]:
        buckets = [self._make_bucket(chunk) for chunk in chunks]
        kinds: dict[torch.dtype, list[OwnedBucket]] = {}
        for bucket in buckets:
            kinds.setdefault(bucket.like.dtype, []).append(bucket)
        for of_kind in kinds.values():
            for turn in range(_IN_FLIGHT):
                in_turn = [b for b in of_kind if buckets.index(b) % _IN_FLIGHT == turn]
                if in_turn:
                    memory = Memory(in_turn)
                    for bucket in in_turn:
                        bucket.take_memory(memory)
        return buckets

    def _make_bucket(self, named: Named) -> OwnedBucket:
        return OwnedBucket(named, self._assignment, self._collectives, self.owners)

    @property
    def finishes_on_device(self) -> bool:
        return False

    def _agree_on_usage(self) -> None:
        """Learn which parameters took part in a lane of any rank, of all buckets at once."""
        here = [used for bucket in self._buckets for used in bucket.seen]
        wire = self._collectives.wire(self._collectives.device)
        everywhere = torch.tensor(here, dtype=torch.int32, device=wire)
        dist.all_reduce(everywhere, dist.ReduceOp.MAX)  # in any order
        found = [bool(used) for used in everywhere.tolist()]
        for bucket in self._buckets:
            mine, found = found[: len(bucket.params)], found[len(bucket.params) :]
            bucket.agree(mine, self.usage_varies)

    def finish(self, stats: LocalStats) -> None:
        super().finish(stats)
        if self.scaling.found is not None:  # each rank has looked at the sums that it owns
            found = self.scaling.found.to(self._collectives.wire(self.scaling.found.device))
            dist.all_reduce(found, dist.ReduceOp.MAX)
            self.scaling.found.copy_(found)
        if self.shares:
            for bucket in self._buckets:
                bucket.make_room()
            self._spread("gradients", lambda param: param.grad)

    def spread_weights(self, changed: Container[int]) -> None:
        """Send the weights that owners have changed to all ranks.

        Args:
            changed: The `id` of each of them.
        """
        self._spread("weights", lambda param: param.detach() if id(param) in changed else None)

    @torch.no_grad()
    def _spread(self, what: str, value: Callable[[Parameter], Tensor | None]) -> None:
        with self._collectives.activity.waiting(what):
            for number, bucket in enumerate(self._buckets):
                bucket.begin_spread(value)
                if number:
                    self._buckets[number - 1].end_spread(value)
            self._buckets[-1].end_spread(value)

    def is_used(self, param: Parameter) -> bool:
        """Return whether a lane of any rank had a gradient of it in this step."""
        bucket, place = self._places[id(param)]
        return bucket.used is not None and bucket.used[place]


class OwnedBucket(Bucket):
    """Parameters of one dtype, laid out owner by owner."""

    def __init__(
        self,
        named: Named,
        assignment: Sequence[range],
        collectives: TorchCollectives,
        owners: Owners,
    ) -> None:
        super().__init__(named, assignment[collectives.rank])
        self.rank, self._world = collectives.rank, collectives.world
        self.blocks = [aligned_blocks(lanes) for lanes in assignment]
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
        self.part = self.parts[self.rank]
        """The place of this rank's parameters."""
        self._total = self.like.new_zeros(self.part.stop - self.part.start)
        self._pending: Pending | None = None

    def take_memory(self, memory: Memory) -> None:
        """Take the memory that this bucket is sent and received in."""
        own, count = self._total.numel(), len(self.blocks[self.rank])
        self._rows = memory.rows[:count, : self.numel]
        self._sent = memory.sent[:count, : self.numel]
        places = list(zip(self._offsets, self.params, self._strides, strict=True))
        self._views = [[view_of(row, *place) for place in places] for row in self._rows]
        first = self.part.start
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
                (peer, arriving[starts[peer] + at])
                for peer in others
                for at in range(len(self.blocks[peer]))
            )
        self._gather += send(
            (peer, row[self.parts[peer]])
            for peer in others
            for row in self._sent
            if self.parts[peer].stop > self.parts[peer].start
        )
        self._spread = receive(
            (peer, self._sent[0][self.parts[peer]])
            for peer in others
            if self.parts[peer].stop > self.parts[peer].start
        )
        if own:
            self._spread += send((peer, self._sent[0][self.part]) for peer in others)
        self._mine_in = arriving[starts[self.rank] : starts[self.rank] + count]
        self._first, self._additions = arriving[0], additions(arriving, held) if own else []

    # -- sums to their owners --------------------------------------------------------------

    def collect(self, lane: int, may_vary: bool) -> None:
        here = (param.grad is not None for param in self.params)
        self.seen = [seen or now for seen, now in zip(self.seen, here, strict=True)]
        super().collect(lane, may_vary)

    def send(self, with_usage: bool) -> None:
        for row, views, grads in zip(self._rows, self._views, self.close(), strict=True):
            row.fill_(NOTHING)  # also between parameters, which is checked, too
            self._write(views, grads)
        self._put_on_wire()
        self._pending = start_exchange(self._gather)
        self._mine_in.copy_(self._sent[:, self.part])

    def advance(self) -> None:
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        for left, right in self._additions:
            left.add_(right)
        if self._total.numel():
            self._total.copy_(self._first)

    def wait(self) -> None:
        self.advance()

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

    def make_room(self) -> None:
        """Let all gradients of the step have memory, for those that others own to be put there."""
        assert self.used is not None, "agreed on in the first step"
        for param, stride, mine, used in zip(
            self.params, self._strides, self._mine, self.used, strict=True
        ):
            if used and not mine:
                param.grad = torch.empty_strided(
                    param.shape, stride, dtype=param.dtype, device=param.device
                )

    def begin_spread(self, value: Callable[[Parameter], Tensor | None]) -> None:
        """Send a value of each own parameter to all ranks."""
        own = [
            value(param) if mine else None
            for param, mine in zip(self.params, self._mine, strict=True)
        ]
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
        own = max(bucket.part.stop - bucket.part.start for bucket in buckets)
        self.rows = first.like.new_zeros(max(1, mine), numel)
        is_on_wire = first.like.device.type == first.wire.type
        self.sent = self.rows if is_on_wire else torch.zeros_like(self.rows, device=first.wire)
        self.arriving = first.like.new_zeros(blocks, own, device=first.wire)
