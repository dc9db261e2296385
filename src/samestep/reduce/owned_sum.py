"""The lane tree with sums that only their owners get (`distributed.shard: optimizer`).

A bucket is laid out owner by owner. Each rank sends every owner its part, and the owner adds what it got
in the tree's order: the additions of `exchange.py`, whose second half, the sum to all ranks, is left out.
Where one owner has most of a bucket, it would receive that from all ranks: then each rank adds up an even
slice, and sends the sum to the owners. After the update the owners send their weights to all ranks, through
the same memory. As many bytes are sent as without owners, and a part of 1 / W more of what goes by slices.

Two buckets are in flight at a time, in memory that all buckets share. What stays is the sum of this rank's
own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from samestep.reduce.gradients import RecordedSums
from samestep.reduce.owned_bucket import Memory, OwnedBucket
from samestep.reduce.owners import Owners
from samestep.reduce.stats import LocalStats, RankFlags, gather_stats
from samestep.reduce.tree_sum import BUCKET_BYTES, FIRST_BUCKET_BYTES, Named, SumSetup, TreeSum, cut_buckets

_IN_FLIGHT = 2
"""Buckets that share memory in turn; as many may wait for other ranks at once."""
_PARTS = 16
"""Buckets that a small model has at least."""


def bucket_bytes(params: Sequence[Tensor]) -> int:
    """Return the bytes after which a bucket ends.

    Two buckets are sent and two received at once: of a small model these would be most of it.
    """
    return max(FIRST_BUCKET_BYTES, min(BUCKET_BYTES, sum(p.nbytes for p in params) // _PARTS))


class OwnedSum(TreeSum):
    """Sums the lanes of all ranks in the tree's order, each parameter's on its owner."""

    reads_recorded = True
    _buckets: list[OwnedBucket]

    def __init__(self, params: Named, setup: SumSetup, owners: Owners) -> None:
        self.owners = owners
        self.shares = False
        """Whether every rank gets all sums in `.grad`, for a loop or a listener that reads them."""
        super().__init__(params, setup)
        self._places = {
            id(param): (bucket, place) for bucket in self._buckets for place, param in enumerate(bucket.params)
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

    def record(self, lanes: RecordedSums) -> None:
        return None  # buckets share memory: each is written when it is sent

    def share_recorded(self, lanes: RecordedSums, flags: RankFlags) -> LocalStats:
        self._last_lane, self._sent = None, 0
        for bucket, blocks in zip(self._buckets, self._by_bucket(lanes), strict=True):
            bucket.take_recorded(blocks)
        return gather_stats(self._collectives, lanes.stats, flags, self._assignment)

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
                bucket.allocate_others()
            self._spread("gradients", lambda param: param.grad)

    def spread_weights(self, changed: Container[int]) -> None:
        """Send the weights that owners have changed to all ranks."""
        self._spread("weights", lambda param: param.detach() if id(param) in changed else None)

    @torch.no_grad()
    def _spread(self, what: str, value: Callable[[Parameter], Tensor | None]) -> None:
        with self._collectives.activity.waiting(what):
            for number, bucket in enumerate(self._buckets):
                bucket.begin_spread(value)
                if number:
                    self._buckets[number - 1].end_spread(value)
            self._buckets[-1].end_spread(value)

    @property
    def added_bytes(self) -> int:
        """Bytes that this rank adds up, of all buckets."""
        return sum(bucket.own * bucket.like.element_size() for bucket in self._buckets)

    def is_used(self, param: Parameter) -> bool:
        """Return whether a lane of any rank had a gradient of it in this step."""
        bucket, place = self._places[id(param)]
        return bucket.used is not None and bucket.used[place]
