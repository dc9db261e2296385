"""A loss's blocks of anchors, of which each rank computes those of its lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from samestep.distributed.collectives import Collectives
from samestep.lanes.tree import LaneTree, aligned_blocks
from samestep.reduce.exchange import Exchange, create_exchange


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
