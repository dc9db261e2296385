"""A sum over the lanes of all ranks of anything a loop has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from samestep.distributed.collectives import Collectives
from samestep.errors import StepError
from samestep.lanes.tree import LaneTree, aligned_blocks
from samestep.reduce.exchange import NOTHING, Exchange, create_exchange


def sum_lanes(
    values: Mapping[int, Tensor],
    assignment: Sequence[range],
    collectives: Collectives,
    device: torch.device,
    caller: str = "step.sum_over_lanes",
) -> Tensor:
    """Return the sum in the tree's order, added up in float64 (integers exactly), in the type of the values.

    Raises:
        StepError: The values are not all alike.
    """
    kinds = {(tuple(value.shape), value.dtype) for value in values.values()}
    # A rank without samples has none to look at.
    every = set().union(*collectives.gather(kinds))
    if len(every) != 1:
        raise StepError(f"{caller} needs tensors of one shape and type, not {every}")
    shape, dtype = every.pop()
    whole = not (dtype.is_floating_point or dtype.is_complex)
    like = torch.empty(0, dtype=torch.int64 if whole else torch.float64, device=device)
    tree: LaneTree[Tensor | None] = LaneTree(_add)
    for lane in assignment[collectives.rank]:
        value = values.get(lane)
        tree.push(lane, 1, None if value is None else _real(value.detach()).to(like).flatten())
    numel = torch.Size(shape).numel() * (2 if dtype.is_complex else 1)
    blocks = [aligned_blocks(lanes) for lanes in assignment]
    exchange = create_exchange(blocks, collectives, numel, like)
    for row, node in zip(exchange.rows, tree.nodes, strict=True):
        row.fill_(NOTHING)
        if node is not None:
            row[:numel].copy_(node)
    with collectives.activity.waiting("a sum over lanes"):
        for pending in exchange.start():
            pending.wait()
    total = exchange.total[:numel]
    if dtype.is_complex:
        total = torch.view_as_complex(total.view(-1, 2).clone())
    return total.view(shape).to(dtype)


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right


class LaneBlocks:
    """As many blocks as there are lanes, added up in the order of the lanes' tree."""

    def __init__(self, assignment: Sequence[range], collectives: Collectives) -> None:
        self.blocks = sum(map(len, assignment))
        self.mine = assignment[collectives.rank]
        self._held = [aligned_blocks(lanes) for lanes in assignment]
        self._collectives = collectives
        self._exchange: tuple[tuple[int, torch.dtype], Exchange] | None = None
        """The last one, and for what vectors it is."""

    def add(self, parts: Mapping[int, Tensor]) -> Tensor:
        """Return the sum of all ranks' vectors, the same bits on every rank and at any number of ranks."""
        tree: LaneTree[Tensor] = LaneTree(lambda left, right: left.add_(right))
        for lane in self.mine:
            tree.push(lane, 1, parts[lane])
        first = parts[self.mine[0]]
        exchange, numel = self._exchange_for(first), first.numel()
        for row, node in zip(exchange.rows, tree.nodes, strict=True):
            row[:numel].copy_(node)
        with self._collectives.activity.waiting("the loss"):
            for pending in exchange.start():
                pending.wait()
        return exchange.total[:numel].clone()

    def _exchange_for(self, vector: Tensor) -> Exchange:
        kind = vector.numel(), vector.dtype
        if self._exchange is None or self._exchange[0] != kind:
            like = vector.new_empty(0)
            made = create_exchange(self._held, self._collectives, vector.numel(), like)
            self._exchange = kind, made
        return self._exchange[1]
