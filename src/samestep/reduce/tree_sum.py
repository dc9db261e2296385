"""The whole lane tree over many ranks: buckets that leave while backward still runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.distributed.collectives import TorchCollectives
from samestep.errors import TaskError
from samestep.lanes.tree import aligned_blocks
from samestep.reduce.bucket_stats import BucketStats, slots
from samestep.reduce.exchange import NOTHING, Pending, create_exchange
from samestep.reduce.gradients import GradientSum, Grads, LaneBucket, RecordedSums
from samestep.reduce.scaling import Scaling
from samestep.reduce.stats import LaneStats, LocalStats, RankFlags, gather_stats, inverse

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""As DistributedDataParallel's: a small first bucket starts the exchange early."""
_WIDE = (torch.float32, torch.float64)
"""What lanes' losses can travel in."""
ALIGN = 16
"""Elements a parameter's place in a bucket is rounded up to: one cache line of float32."""

Named = Sequence[tuple[str, Parameter]]
"""Parameters by name."""

_IN_PIECES = (
    "a parameter got its gradient in several pieces in one lane: checkpoint activations with use_reentrant=False"
)


class SumSetup(NamedTuple):
    """The inputs of the sums over ranks, besides the parameters."""

    assignment: Sequence[range]
    """The lanes of each rank."""
    collectives: TorchCollectives
    find_unused: bool
    scaling: Scaling


class TreeSum(GradientSum):
    """Sums the lanes of all ranks in the tree's order, bucket by bucket.

    Buckets are sent in one fixed order on every rank, each as soon as backward of this
    rank's last lane has filled it and the ones before it. Gradients are copied there and let go of:
    besides the buckets there is never more than one bucket's.
    """

    def __init__(self, params: Named, setup: SumSetup) -> None:
        super().__init__(setup.scaling)
        self.usage_varies = setup.find_unused
        self._usage_agreed = False
        self._assignment, self._collectives = setup.assignment, setup.collectives
        self._buckets = self._make_buckets(self._cut(params))
        self._params = [param for _, param in params]
        self._bucket_stats = next((b.bucket_stats for b in self._buckets if b.bucket_stats), None)
        """The lanes' losses and counts, which one of the buckets takes along."""
        self._last_lane: int | None = None
        self._sent = 0
        for bucket in self._buckets:
            for place, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(self._hook(bucket, place))

    def _cut(self, params: Named) -> list[Named]:
        """Return what leaves together, in about the order of the backward pass."""
        return list(cut_buckets(list(reversed(params))))

    def _make_buckets(self, chunks: Sequence[Named]) -> Sequence[Bucket]:
        carrier = next((chunk for chunk in chunks if chunk[0][1].dtype in _WIDE), None)
        return [_SharedBucket(chunk, self._assignment, self._collectives, chunk is carrier) for chunk in chunks]

    def _hook(self, bucket: Bucket, place: int) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            if self._last_lane is not None:
                bucket.waiting -= 1
                if bucket.waiting == 0:
                    self._send_filled()
                elif bucket.waiting < 0:
                    bucket.refuse_too_many(place)

        return ready

    def begin(self, ragged: bool) -> None:
        self._last_lane = None
        self._sent = 0
        for bucket in self._buckets:
            bucket.clear_grads()

    def share(self, lanes: Sequence[LaneStats], flags: RankFlags) -> LocalStats:
        if self._bucket_stats is None:
            return gather_stats(self._collectives, lanes, flags, self._assignment)
        return self._bucket_stats.attach(lanes, flags)

    def backward(self, loss: Tensor, count: Tensor | float, lane: int, last: bool, retain: bool = False) -> None:
        if not last:
            loss.backward(self.scaling.start, retain_graph=retain)
            self.take(lane)
            return
        for bucket in self._buckets:
            bucket.expect(self.usage_varies)
        self._last_lane = lane
        loss.backward(self.scaling.start, retain_graph=retain)

    def take(self, lane: int) -> None:
        for bucket in self._buckets:
            bucket.collect(lane, self.usage_varies)

    @property
    def finishes_on_device(self) -> bool:
        return self._bucket_stats is not None  # else the losses come by a collective of their own

    def record(self, lanes: RecordedSums) -> None:
        for bucket, blocks in zip(self._buckets, self._by_bucket(lanes), strict=True):
            bucket.record(blocks)
        if self._bucket_stats is not None:
            self._bucket_stats.write_lanes(lanes.stats)

    def _by_bucket(self, lanes: RecordedSums) -> list[list[Grads]]:
        """Return what each block of lanes adds up to, of each bucket's parameters."""
        by_block = [dict(zip(map(id, self._params), grads, strict=True)) for grads in lanes.blocks]
        return [[[block[id(param)] for param in bucket.params] for block in by_block] for bucket in self._buckets]

    def share_recorded(self, lanes: RecordedSums, flags: RankFlags) -> LocalStats:
        self._last_lane, self._sent = None, 0
        for bucket in self._buckets:
            bucket.is_written = True
        if self._bucket_stats is None:
            return gather_stats(self._collectives, lanes.stats, flags, self._assignment)
        return self._bucket_stats.write_flags(flags)

    def exchange(self) -> None:
        # All of it before the wait: a rank without samples must call in the others' order.
        while self._sent < len(self._buckets):
            self._send()
        with self._collectives.activity.waiting("gradients"):
            self._buckets[-1].advance()
            for bucket in self._buckets:
                bucket.wait()
            if self._exchange_usage:
                self._agree_on_usage()
        self._last_lane = None
        self._usage_agreed = True

    def finish(self, stats: LocalStats) -> None:
        if self._bucket_stats is not None:
            self._bucket_stats.arrive()
        inverse_count = inverse(stats.count(), self._buckets[0].params[0].device)
        for bucket in self._buckets:
            bucket.deliver(self.scaling, inverse_count, self.lends)

    @property
    def _exchange_usage(self) -> bool:
        """Reading who used what waits for the device: only while it is not known to stay."""
        return self.usage_varies or not self._usage_agreed

    def _agree_on_usage(self) -> None:
        for bucket in self._buckets:
            bucket.agree_on_usage(self.usage_varies)

    def _send_filled(self) -> None:
        while self._sent < len(self._buckets) and self._buckets[self._sent].waiting == 0:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._sent]
        if self._last_lane is not None:
            bucket.collect(self._last_lane, self.usage_varies)
        with self._collectives.activity.waiting("gradient bucket"):
            bucket.send(self._exchange_usage)
            # The second half of the bucket before this one: it has had time to arrive.
            if self._sent:
                self._buckets[self._sent - 1].advance()
        self._sent += 1


class Bucket(LaneBucket):
    """Parameters of one dtype that leave together."""

    bucket_stats: BucketStats | None = None
    """Lanes' losses and counts that are sent along, if this bucket takes them."""
    is_written = False
    """Whether a replay has put this step's sums, and its lanes' losses, into the exchanged buffer."""

    def __init__(self, named: Named, lanes: range) -> None:
        params = [param for _, param in named]
        super().__init__([name for name, _ in named], params, lanes)
        self.waiting = -1
        """Parameters of this bucket that backward has not reached yet."""
        # Complex numbers travel as pairs: their parts are added up each by itself.
        self.width = 2 if params[0].is_complex() else 1
        self.like = params[0].new_empty(0, dtype=params[0].dtype.to_real())
        self._steps: Iterator[Pending] = iter(())
        self._pending: Pending | None = None

    def expect(self, find_unused: bool) -> None:
        """Count down to the last gradient of the coming backward pass."""
        known = self.used is not None and not find_unused
        self.waiting = sum(self.used) if known and self.used is not None else len(self.params)

    def refuse_too_many(self, place: int) -> None:
        """Backward has reached more parameters than the lanes before, or one of them twice."""
        if self.used is not None:
            self.check_used([used or at == place for at, used in enumerate(self.used)], "here")
        raise TaskError(_IN_PIECES)

    def record(self, blocks: Sequence[Grads]) -> None:
        """Write what this rank's lanes add up to, as a part of a CUDA graph."""
        raise AssertionError(f"{type(self).__name__} is not recorded")

    @abstractmethod
    def send(self, with_usage: bool) -> None:
        """Start to send what this rank's lanes add up to."""

    def start(self, steps: Iterator[Pending]) -> None:
        """Start the first of the steps that send, receive and add."""
        self._steps = steps
        self._pending = next(steps, None)

    def advance(self) -> None:
        """Wait for what is pending and start what follows it."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = next(self._steps, None)

    def wait(self) -> None:
        """Wait until this rank has what it gets."""
        while self._pending is not None:
            self.advance()

    @abstractmethod
    def agree_on_usage(self, may_vary: bool) -> None:
        """Learn which parameters took part in a lane of any rank."""

    @abstractmethod
    def deliver(self, scaling: Scaling, inverse_count: Tensor | float, lends: bool) -> None:
        """Leave the scaled sum in `.grad`, and None where no lane of any rank had a gradient."""


class _SharedBucket(Bucket):
    """Side by side in one exchanged buffer, whose sum every rank gets."""

    def __init__(
        self, named: Named, assignment: Sequence[range], collectives: TorchCollectives, has_stats: bool
    ) -> None:
        super().__init__(named, assignment[collectives.rank])
        params, offsets = self.params, [0]
        for param in params:
            offsets.append(offsets[-1] + -(-self.width * param.numel() // ALIGN) * ALIGN)
        self._offsets = offsets
        self._usage = slice(offsets[-1], offsets[-1] + len(params))
        lanes, first = sum(map(len, assignment)), self._usage.stop
        last = first + (slots(lanes, len(assignment)) if has_stats else 0)
        self._exchange = create_exchange(
            [aligned_blocks(lanes) for lanes in assignment], collectives, last + last % 2, self.like
        )
        if has_stats:
            places, rank = self._exchange.total[first:last], collectives.rank
            self.bucket_stats = BucketStats(places, assignment[rank], lanes, rank, places.device.type == "cpu")
        self._views = [
            [view_of(row, at, param) for at, param in zip(offsets, params, strict=False)] for row in self._exchange.rows
        ]

    def record(self, blocks: Sequence[Grads]) -> None:
        if self.used is not None:
            self.check_used([grad is not None for grad in blocks[0]], "as a CUDA graph")
        self.take_blocks(blocks)
        self._write_blocks(with_usage=False)

    def send(self, with_usage: bool) -> None:
        if self.is_written:
            self.is_written = False
        else:
            self._write_blocks(with_usage)
        if self.bucket_stats is not None:
            self.bucket_stats.write()
        self.start(self._exchange.start())

    def _write_blocks(self, with_usage: bool) -> None:
        for row, views, grads in zip(self._exchange.rows, self._views, self.close(), strict=True):
            self._write(row, views, grads)
            if with_usage:
                row[self._usage] = torch.tensor([grad is not None for grad in grads]).to(row)

    def _write(self, row: Tensor, views: list[Tensor], grads: Grads) -> None:
        present = [(view, g) for view, g in zip(views, grads, strict=True) if g is not None]
        if len(present) < len(grads):
            row.fill_(NOTHING)
        if present:
            torch._foreach_copy_([view for view, _ in present], [g for _, g in present])

    def agree_on_usage(self, may_vary: bool) -> None:
        everywhere = [count > 0 for count in self._exchange.total[self._usage].tolist()]
        if self.used is not None and not may_vary:
            self.check_used(everywhere, "on another rank")
        self.used = everywhere

    def deliver(self, scaling: Scaling, inverse_count: Tensor | float, lends: bool) -> None:
        assert self.used is not None, "agreed on in the first step"
        # Without the bucket_stats behind the gradients, which stay as they are until they are sent.
        total, views = self._exchange.total[: self._usage.start], self._views[0]
        if not lends:
            total = total.clone()
            places = zip(self._offsets, self.params, strict=False)
            views = [view_of(total, at, param) for at, param in places]
        scaling.apply([total], inverse_count)
        for param, view, used in zip(self.params, views, self.used, strict=True):
            param.grad = view if used else None


def view_of(row: Tensor, offset: int, param: Parameter, stride: tuple[int, ...] | None = None) -> Tensor:
    """Return the parameter's place in the row, in the parameter's own memory layout, or with these strides."""
    if param.is_complex():
        place = row[offset : offset + 2 * param.numel()].view(param.dtype)
    else:
        place = row[offset : offset + param.numel()]
    if stride is None and param.is_contiguous():
        return place.view(param.shape)
    return place.as_strided(
        param.shape, stride or torch.empty_like(param, device="meta").stride(), place.storage_offset()
    )


T = TypeVar("T", bound=Tensor)


def cut_buckets(params: Sequence[tuple[str, T]], most: int = BUCKET_BYTES) -> Iterator[list[tuple[str, T]]]:
    """Cut the parameters into buckets of one dtype and bounded size."""
    chunk: list[tuple[str, T]] = []
    size, limit = 0, FIRST_BUCKET_BYTES
    for name, param in params:
        other = bool(chunk) and (param.dtype, param.device) != (chunk[0][1].dtype, chunk[0][1].device)
        if chunk and (other or size >= limit):
            yield chunk
            chunk, size, limit = [], 0, most
        chunk.append((name, param))
        size += param.numel() * param.element_size()
    if chunk:
        yield chunk
