"""Sums that only their owners get, where also weights are sharded (`distributed.shard: weights`).

All ranks run the lanes of a round at once, W consecutive ones, and send the gradients of each to their
owners while backward still runs. An owner adds them up in the tree's order as they come. Between rounds it
holds at most log2(lanes) + 1 partial sums of its own parameters, and nobody holds gradients of others'.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from samestep.errors import TaskError
from samestep.lanes.tree import LaneTree
from samestep.reduce.exchange import NOTHING, Pending, receive, send, start_exchange
from samestep.reduce.gradients import Grads
from samestep.reduce.owned_bucket import Blocks, Memory, OwnedBucket
from samestep.reduce.owned_sum import OwnedSum, bucket_bytes
from samestep.reduce.sharded_weights import BACKWARD, TRAINING, ShardedWeights
from samestep.reduce.tree_sum import Named, SumSetup, cut_buckets

_GRADIENTS = 1
"""The tag of messages."""


class RoundSum(OwnedSum):
    """Sums the lanes of all ranks round by round, each parameter's on its owner."""

    shares_early = False  # ranks' last lanes are in different rounds
    _buckets: list[RoundBucket]  # type: ignore[assignment]

    def __init__(self, params: Named, setup: SumSetup, weights: ShardedWeights) -> None:
        self._weights = weights
        self._ends: dict[int, int] = {}
        """The unit whose last gradients a bucket has, by the bucket's number."""
        self._round = 0
        super().__init__(params, setup, weights.owners)

    def _cut(self, params: Named) -> list[Named]:
        most = bucket_bytes([param for _, param in params])
        buckets: list[Named] = []
        last = len(self._weights.units) - 1
        for number in (*reversed(range(last)), last):  # what is in no block gets its last gradient last
            cut = cut_buckets(list(reversed(self._weights.units[number].params)), most)
            before = len(buckets)
            buckets += cut
            if len(buckets) > before:
                self._ends[len(buckets) - 1] = number
        return buckets

    def _make_bucket(self, named: Named) -> RoundBucket:
        return RoundBucket(named, self._assignment, self._collectives, self.owners)

    # -- rounds ----------------------------------------------------------------------------

    def begin(self, ragged: bool) -> None:
        super().begin(ragged)
        if self.filled is None:
            raise TaskError(
                "distributed.shard: weights needs to know which lanes have samples before they are read, which "
                "iterable data does not tell: take a map-style dataset, or set shard: optimizer"
            )
        self._round = 0

    @property
    def _lanes(self) -> range:
        """The lanes of the round that have samples."""
        assert self.filled is not None, "refused before"
        world = self._collectives.world
        first = self._round * world
        return range(first, max(first, min(first + world, self.filled)))

    @property
    def _busy(self) -> range:
        """The ranks that run a lane in this round."""
        return range(len(self._lanes))

    @property
    def _kind(self) -> str:
        return BACKWARD if self.in_body else TRAINING

    def forward_scope(self, last: bool) -> AbstractContextManager[None]:
        self._weights.begin_pass(self._kind, self._busy)
        return nullcontext()

    def backward(self, loss: Tensor, count: Tensor | float, lane: int, last: bool, retain: bool = False) -> None:
        if self.in_body:
            self._weights.begin_pass(self._kind, self._busy)
        super().backward(loss, count, lane, True, retain)
        while self._sent < len(self._buckets):
            self._send()
        self._end_round()
        self._weights.end_pass()

    def _end_round(self) -> None:
        with self._collectives.activity.waiting("gradients"):
            self._buckets[-1].advance()
        self._round, self._sent, self._last_lane = self._round + 1, 0, None

    def _send(self) -> None:
        number = self._sent
        self._weights.announce_bucket(number)  # first: a rank without a lane receives it only after this command
        self._exchange_bucket(number)
        if number in self._ends:
            self._weights.close(self._ends[number])
        self._sent += 1

    def _exchange_bucket(self, number: int) -> None:
        bucket, lanes = self._buckets[number], self._lanes
        if self._last_lane is not None:
            bucket.collect(self._last_lane, self.usage_varies)
        with self._collectives.activity.waiting("gradient bucket"):
            bucket.exchange(lanes, lanes.stop == self.filled)
            if number:
                self._buckets[number - 1].advance()

    def exchange(self) -> None:
        if not self.filled:
            for bucket in self._buckets:
                bucket.clear()
        while self._lanes:
            self._weights.follow(self._kind, self._busy, self._exchange_bucket)
            self._end_round()
        with self._collectives.activity.waiting("gradients"):
            for bucket in self._buckets:
                bucket.wait()
        if self._exchange_usage:
            with self._collectives.activity.waiting("gradients"):
                self._agree_on_usage()
        self._usage_agreed = True

    def spread_weights(self, changed: Container[int]) -> None:
        self._weights.changed()


class RoundBucket(OwnedBucket):
    """Parameters of one dtype, whose lanes come round by round."""

    _grads: Grads | None = None
    """Those of this rank's lane in the round."""

    def _blocks(self, assignment: Sequence[range]) -> Blocks:
        return [[(rank, 1)] for rank in range(len(assignment))]  # one lane per rank and round

    def _lay_out(self, arriving: Tensor, memory: Memory) -> None:
        summed = self._total
        if self.goes_by_slices:
            summed = self.like.new_zeros(self.own, device=self.wire)
            self._pass_on(summed, memory.passed[: self.held])
        self._partial = _PartialSums(summed, self.wire)
        self._arriving = list(arriving)
        self._from = [receive([(peer, row)]) for peer, row in enumerate(self._arriving)]
        self._to = [
            send([(peer, self._sent[0][part])] if part.stop > part.start else [])
            for peer, part in enumerate(self.added)
        ]

    def clear(self) -> None:
        """Take the sum of no lanes."""
        self._total.fill_(NOTHING)

    def collect(self, lane: int, may_vary: bool) -> None:
        self._grads = [param.grad for param in self.params]
        self.clear_grads()
        used = [grad is not None for grad in self._grads]
        self.seen = [seen or now for seen, now in zip(self.seen, used, strict=True)]
        if self.used is not None and not may_vary:
            self.check_used(used, f"in lane {lane}")

    def exchange(self, lanes: range, is_last: bool) -> None:
        """Start to send this rank's gradients of a round to their owners, and to receive what it owns."""
        self._memory.lend(self)
        is_busy, messages = self.rank < len(lanes), []
        if self.own:
            busy = (peer for peer in range(len(lanes)) if peer != self.rank)
            messages += [message for peer in busy for message in self._from[peer]]
        grads, self._grads = self._grads, None
        if is_busy:
            self._rows[0].fill_(NOTHING)  # also between parameters, which is checked, too
            self._write(self._views[0], grads or [None] * len(self.params))
            self._put_on_wire()
            others = (peer for peer in range(self._world) if peer != self.rank)
            messages += [message for peer in others for message in self._to[peer]]
        pending = start_exchange(messages, _GRADIENTS, self._collectives.group("gradients"))
        if is_busy:
            self._arriving[self.rank].copy_(self._sent[0][self.added[self.rank]])
        self.start(self._round(pending, lanes, is_last))

    def _round(self, pending: Pending, lanes: range, is_last: bool) -> Iterator[Pending]:
        yield pending
        if self.own:
            self._partial.add(zip(lanes, self._arriving, strict=False), is_last)
        if is_last:
            yield from self._to_owners(_GRADIENTS)


class _PartialSums:
    """The sum of the lanes that have come so far, in the tree's order, in few pieces of memory."""

    def __init__(self, total: Tensor, device: torch.device) -> None:
        self._total, self._device = total, device
        self._tree: LaneTree[Tensor] = LaneTree(self._added)
        self._held: list[Tensor] = []
        """The memory that partial sums are in; that of the first lanes is the whole sum's."""
        self._spare: list[Tensor] = []

    def add(self, rows: Iterable[tuple[int, Tensor]], is_last: bool) -> None:
        """Add the lanes of a round.

        Args:
            rows: Lanes with their gradients, in memory that is used again.
            is_last: Whether there is no further round: leaves the whole sum in its place.
        """
        for lane, row in rows:
            self._tree.push(lane, 1, row)
        if not is_last:
            self._tree.keep(self._kept)
            return
        found = self._tree.close()
        if found is not self._total:
            self._total.copy_(found)
        self._tree.clear()
        self._spare += [held for held in self._held if held is not self._total]
        self._held.clear()

    def _kept(self, value: Tensor) -> Tensor:
        if any(value is held for held in self._held):
            return value
        if not self._held and self._total.device.type == self._device.type:
            place = self._total
        elif self._spare:
            place = self._spare.pop()
        else:
            place = torch.empty_like(self._total, device=self._device)
        self._held.append(place)
        return place.copy_(value)

    def _added(self, left: Tensor, right: Tensor) -> Tensor:
        if any(right is held for held in self._held):
            self._held = [held for held in self._held if held is not right]
            self._spare.append(right)
        return left.add_(right)
