"""Rows of a whole dataset, distributed to ranks in blocks, in the order of the samples.

A block holds the same samples at any number of ranks, and what is computed from blocks alone has the
same bits there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.distributed.collectives import Collectives, TorchCollectives
from samestep.errors import TaskError


@dataclass(frozen=True)
class ShardPlan:
    """The rows that each rank holds: whole blocks, one rank's after the other's."""

    rows: int
    block: int
    """Rows in a block; the last one may have fewer."""
    world: int

    @property
    def blocks(self) -> int:
        """Return how many blocks there are."""
        return -(-self.rows // self.block)

    def blocks_of(self, rank: int) -> range:
        """Return the numbers of a rank's blocks."""
        return range(self._first(rank), self._first(rank + 1))

    def rows_of(self, rank: int) -> range:
        """Return the numbers of a rank's rows."""
        held = self.blocks_of(rank)
        return range(self._row(held.start), self._row(held.stop))

    def rows_in(self, block: int) -> range:
        """Return the numbers of a block's rows."""
        return range(self._row(block), self._row(block + 1))

    def _first(self, rank: int) -> int:
        return self.blocks * rank // self.world

    def _row(self, block: int) -> int:
        return min(self.rows, block * self.block)


class RowExchange:
    """Brings rows to the ranks that hold them, and blocks to all. Every rank makes the same calls."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self._is_alone = not isinstance(collectives, TorchCollectives)
        self._wire = (
            collectives.wire(collectives.device) if isinstance(collectives, TorchCollectives) else torch.device("cpu")
        )

    def settle(self, plan: ShardPlan, ids: Sequence[int], rows: Tensor) -> Tensor:
        """This rank's rows of the plan, in order, in host memory.

        Args:
            plan: Which rank holds which rows.
            ids: The numbers of those that this rank has now.
            rows: The rows themselves, one for each; as wide on a rank that has none.
        """
        at = torch.tensor(ids, dtype=torch.int64)
        order = torch.argsort(at)
        at, rows = at[order], rows.cpu()[order]
        mine = plan.rows_of(self.collectives.rank)
        if not self._is_alone:
            bounds = torch.tensor([plan.rows_of(rank).stop for rank in range(plan.world)])
            ends = torch.searchsorted(at, bounds).tolist()
            counts = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
            received = [row[self.collectives.rank] for row in self.collectives.gather(counts)]
            at = self._swap(at, counts, received)
            rows = self._swap(rows, counts, received)
        if len(at) != len(mine):
            raise TaskError(
                f"rows {mine.start} to {mine.stop} of a dataset were computed {len(at)} times, and not "
                f"{len(mine)}: each sample has one row"
            )
        settled = torch.empty_like(rows)
        settled[at - mine.start] = rows
        return settled

    def _swap(self, rows: Tensor, counts: list[int], received: list[int]) -> Tensor:
        """Return what all ranks have for this one."""
        sent = rows.contiguous().to(self._wire)
        found = sent.new_empty((sum(received), *sent.shape[1:]))
        with self.collectives.activity.waiting("rows of other ranks"):
            dist.all_to_all_single(found, sent, received, counts)
        return found.cpu()

    def blocks(self, plan: ShardPlan, mine: Tensor, device: torch.device) -> Iterator[Tensor]:
        """Yield each block of all ranks' rows, in order, on every rank: the next one travels meanwhile.

        Args:
            mine: What `settle` returned.
        """
        ahead = self._start(plan, 0, mine)
        for number in range(plan.blocks):
            block, work = ahead
            if number + 1 < plan.blocks:
                ahead = self._start(plan, number + 1, mine)
            waiting = self.collectives.activity.waiting("a block of rows")
            with nullcontext() if work is None else waiting:
                if work is not None:
                    work.wait()
            yield block.to(device)

    def _start(self, plan: ShardPlan, number: int, mine: Tensor) -> tuple[Tensor, dist.Work | None]:
        at = plan.rows_in(number)
        owner = next(rank for rank in range(plan.world) if number in plan.blocks_of(rank))
        first = plan.rows_of(self.collectives.rank).start
        if self._is_alone:
            return mine[at.start - first : at.stop - first], None
        if owner == self.collectives.rank:
            block = mine[at.start - first : at.stop - first].contiguous().to(self._wire)
        else:
            block = mine.new_empty((len(at), *mine.shape[1:]), device=self._wire)
        return block, dist.broadcast(block, src=owner, async_op=True)

    def add_up(self, numbers: Tensor) -> Tensor:
        """Return the sum of all ranks' whole numbers, which no order of additions changes."""
        assert not numbers.is_floating_point(), "floats add up to other bits in another order"
        if self._is_alone:
            return numbers
        total = numbers.to(self._wire, copy=True)
        with self.collectives.activity.waiting("a sum of whole numbers"):
            dist.all_reduce(total)
        return total.to(numbers.device)
