"""The upper part of the lane tree: partial sums of all ranks, added in one fixed order.

A library's all-reduce adds in an order that depends on the world, the message and the
topology. Here every addition is one of the tree's. Three ways:

- one rank: its blocks are added in place.
- two ranks holding one block each: a plain all-reduce, since a + b is b + a.
- anything else: every rank sends each other rank one slice of its blocks, adds the slices it
  got in the tree's order, and sends the sum to all. That moves no more bytes than a ring, and
  point to point it copies nothing on the way, which gloo's all-to-all and all-gather do.

Tensors handed to a collective are attributes, not temporaries: what the backend's thread
holds last is freed on that thread, and at exit that can crash the process.

A started exchange is a generator that yields each pending collective, so that a caller can
start the next buffer while this one is in flight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.distributed.collectives import Collectives
from samestep.lanes.tree import merge_order

Blocks = Sequence[Sequence[tuple[int, int]]]
"""For each rank, the (start, size) blocks of lanes it holds a partial sum of."""


NOTHING = -0.0
"""What an empty lane adds: x + -0.0 is x to the bit, also where x is -0.0."""


_ADD_AT_ONCE = 1 << 17
"""Elements added at a time: small enough for all blocks' parts to stay in the cache."""


class Pending:
    """Collectives in flight."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Exchange(ABC):
    """One buffer whose blocks the ranks add up, again and again. Allocated once."""

    rows: Tensor
    """(blocks of this rank, at least numel): write the partial sums here."""
    total: Tensor
    """The sum over all ranks, once the exchange is complete; its memory is row 0's."""

    @abstractmethod
    def start(self) -> Iterator[Pending]:
        """Start adding up all ranks' blocks; yields what to wait for, one after the other."""


def create_exchange(blocks: Blocks, collectives: Collectives, numel: int, like: Tensor) -> Exchange:
    """Return the cheapest exchange that adds these blocks in the tree's order."""
    if len(blocks) == 1:
        return _LocalSum(blocks[0], numel, like)
    wire = collectives.wire(like.device)
    if like.device.type != wire.type:
        staged = create_exchange(blocks, collectives, numel, like.new_empty(0, device=wire))
        return _StagedSum(staged, like)
    if len(blocks) == 2 and all(len(held) == 1 for held in blocks):
        return _TwoSum(numel, like)
    return _SliceSum(blocks, collectives.rank, numel, like)


def additions(rows: Tensor, held: Sequence[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    """Return what is added to what, for row 0 to be the sum of all rows in the tree's order."""
    return [(part[left], part[right]) for part in rows.split(_ADD_AT_ONCE, dim=1) for left, right in merge_order(held)]


class _LocalSum(Exchange):
    def __init__(self, held: Sequence[tuple[int, int]], numel: int, like: Tensor) -> None:
        self.rows = like.new_zeros(len(held), numel)
        self.total = self.rows[0]
        self._additions = additions(self.rows, held)

    def start(self) -> Iterator[Pending]:
        for left, right in self._additions:
            left.add_(right)
        yield from ()


class _TwoSum(Exchange):
    def __init__(self, numel: int, like: Tensor) -> None:
        self.rows = like.new_zeros(1, numel)
        self.total = self.rows[0]

    def start(self) -> Iterator[Pending]:
        yield Pending([_started(dist.all_reduce(self.total, async_op=True))])


class _StagedSum(Exchange):
    """Exchanges through the host: ranks that share a GPU, over gloo."""

    def __init__(self, staged: Exchange, like: Tensor) -> None:
        self._staged = staged
        self.rows = like.new_zeros(staged.rows.shape)
        self.total = self.rows[0]

    def start(self) -> Iterator[Pending]:
        self._staged.rows.copy_(self.rows)
        yield from self._staged.start()
        self.total.copy_(self._staged.total)


class _SliceSum(Exchange):
    def __init__(self, blocks: Blocks, rank: int, numel: int, like: Tensor) -> None:
        world = len(blocks)
        size = -(-numel // world)
        size += size % 2  # rows then begin at even places, where complex numbers can be viewed
        self.rows = like.new_zeros(len(blocks[rank]), size * world)
        self.total = self.rows[0]
        self._incoming = like.new_zeros(sum(map(len, blocks)), size)
        self._additions = additions(self._incoming, [block for held in blocks for block in held])
        first = [sum(map(len, blocks[:r])) for r in range(world)]
        slices = [row.split(size) for row in self.rows]
        self._mine_out = [parts[rank] for parts in slices]
        self._mine_in = self._incoming[first[rank] : first[rank] + len(slices)].unbind()
        self._sum, self._place = self._incoming[0], slices[0][rank]
        others = [(rank + distance) % world for distance in range(1, world)]
        self._scatter = [
            *receive((peer, self._incoming[first[peer] + i]) for peer in others for i in range(len(blocks[peer]))),
            *send((peer, parts[peer]) for peer in others for parts in slices),
        ]
        self._gather = [
            *receive((peer, slices[0][peer]) for peer in others),
            *send((peer, self._place) for peer in others),
        ]

    def start(self) -> Iterator[Pending]:
        pending = start_exchange(self._scatter)
        torch._foreach_copy_(self._mine_in, self._mine_out)
        yield pending
        for left, right in self._additions:
            left.add_(right)
        self._place.copy_(self._sum)
        yield start_exchange(self._gather)


Message = tuple[Callable[..., Any], Tensor, int]
"""Whether a tensor is sent or received, the tensor, and the other rank."""


def send(parts: Iterable[tuple[int, Tensor]]) -> list[Message]:
    """Return the messages that send tensors to ranks."""
    return [(dist.isend, tensor, peer) for peer, tensor in parts]


def receive(parts: Iterable[tuple[int, Tensor]]) -> list[Message]:
    """Return the messages that receive tensors from ranks."""
    return [(dist.irecv, tensor, peer) for peer, tensor in parts]


def start_exchange(messages: Sequence[Message], tag: int = 0, group: dist.ProcessGroup | None = None) -> Pending:
    """Start to send and receive.

    Args:
        messages: What, and with whom; may be empty.
        tag: Messages of other tags may overtake these, where the backend knows tags.
        group: Of all ranks; None is the default one.
    """
    if not messages:
        return Pending([])
    group = group or dist.group.WORLD
    assert group is not None, "ranks exchange while their group is open"
    if messages[0][1].device.type == "cpu":
        return _by_group(messages, tag, group)
    # A P2POp holds the process group, which must end when it is destroyed: made when needed.
    return Pending(dist.batch_isend_irecv([dist.P2POp(*message, group) for message in messages]))


def _by_group(messages: Sequence[Message], tag: int, group: dist.ProcessGroup) -> Pending:
    """Return the same without the checks of each message, which take a fifth of a short exchange's time."""
    return Pending(
        [(group.send if call is dist.isend else group.recv)([tensor], peer, tag) for call, tensor, peer in messages]
    )


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
