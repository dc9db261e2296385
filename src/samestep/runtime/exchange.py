"""The upper part of the lane tree: partial sums of all ranks, added in one fixed order.

A library's all-reduce adds in an order that depends on the world, the message and the
topology. Here every addition is one of the tree's. Three ways:

- one rank: its blocks are added where they lie.
- two ranks holding one block each: a plain all-reduce, since a + b is b + a.
- anything else: all-to-all, so that each rank holds one slice of every block; the tree over
  that slice; all-gather. It moves no more bytes than a ring.

Tensors handed to a collective are attributes, not temporaries: whatever the backend's thread
is last to hold, it frees there, and at exit that can end the process.

A started exchange is a generator that yields each pending collective, so that a caller can
start the next buffer while this one is on its way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.plan import merge_order

Blocks = Sequence[Sequence[tuple[int, int]]]
"""For each rank, the (start, size) blocks of lanes it holds a partial sum of."""


NOTHING = -0.0
"""What an empty lane adds: x + -0.0 is x to the bit, also where x is -0.0."""


def all_gather_single(output: Tensor, piece: Tensor, *, async_op: bool) -> dist.Work:
    """Torch's call of this name, which before 2.13 had another."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return _started(call(output, piece, async_op=async_op))


class Exchange(ABC):
    """One buffer whose blocks the ranks add up, again and again. Allocated once."""

    rows: Tensor
    """(blocks of this rank, at least numel): bring the partial sums here."""
    total: Tensor
    """The sum over all ranks, once the exchange is through; its memory is row 0's."""

    @abstractmethod
    def start(self) -> Iterator[dist.Work]:
        """Add up what all ranks brought; yields what to wait for, one after the other."""


def create_exchange(
    blocks: Blocks, rank: int, numel: int, like: Tensor, wire: torch.device
) -> Exchange:
    """The cheapest exchange that adds these blocks in the tree's order.

    `wire` is where the backend takes tensors from: for gloo the host's memory.
    """
    if len(blocks) == 1:
        return _LocalSum(blocks[0], numel, like)
    if like.device.type != wire.type:
        staged = create_exchange(blocks, rank, numel, like.new_empty(0, device=wire), wire)
        return _StagedSum(staged, like)
    if len(blocks) == 2 and all(len(held) == 1 for held in blocks):
        return _TwoSum(numel, like)
    return _SliceSum(blocks, rank, numel, like)


class _LocalSum(Exchange):
    def __init__(self, held: Sequence[tuple[int, int]], numel: int, like: Tensor) -> None:
        self._additions = merge_order(held)
        self.rows = like.new_zeros(len(held), numel)
        self.total = self.rows[0]

    def start(self) -> Iterator[dist.Work]:
        for left, right in self._additions:
            self.rows[left] += self.rows[right]
        yield from ()


class _TwoSum(Exchange):
    def __init__(self, numel: int, like: Tensor) -> None:
        self.rows = like.new_zeros(1, numel)
        self.total = self.rows[0]

    def start(self) -> Iterator[dist.Work]:
        yield _started(dist.all_reduce(self.total, async_op=True))


class _StagedSum(Exchange):
    """By way of the host: ranks that share a GPU, over gloo."""

    def __init__(self, staged: Exchange, like: Tensor) -> None:
        self._staged = staged
        self.rows = like.new_zeros(staged.rows.shape)
        self.total = self.rows[0]

    def start(self) -> Iterator[dist.Work]:
        self._staged.rows.copy_(self.rows)
        yield from self._staged.start()
        self.total.copy_(self._staged.total)


class _SliceSum(Exchange):
    def __init__(self, blocks: Blocks, rank: int, numel: int, like: Tensor) -> None:
        world = len(blocks)
        self._counts = [len(held) for held in blocks]
        self._additions = merge_order([block for held in blocks for block in held])
        size = -(-numel // world)
        mine = self._counts[rank]
        self.rows = like.new_zeros(mine, size * world)
        self.total = self.rows[0]
        self._by_slice = self.rows.view(mine, world, size).transpose(0, 1)
        self._outgoing = like.new_zeros(world, mine, size)
        self._incoming = like.new_zeros(sum(self._counts), size)
        self._flat_outgoing = self._outgoing.view(-1)
        self._flat_incoming = self._incoming.view(-1)
        self._my_slice = self._incoming[0]
        self._sizes_in = [count * size for count in self._counts]
        self._sizes_out = [mine * size] * world

    def start(self) -> Iterator[dist.Work]:
        self._outgoing.copy_(self._by_slice)
        yield _started(
            dist.all_to_all_single(
                self._flat_incoming,
                self._flat_outgoing,
                self._sizes_in,
                self._sizes_out,
                async_op=True,
            )
        )
        for left, right in self._additions:
            self._incoming[left] += self._incoming[right]
        yield all_gather_single(self.total, self._my_slice, async_op=True)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
