"""The memory that a CUDA graph reads its batches from, and how a step's batches get there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from samestep.data.batch import LaneBatch
from samestep.pytree import leaves, map_leaves, signature

_STAGED = 1 << 16
"""Bytes of a lane's tensor up to which all lanes travel together: a copy to the device costs more
than one on the host."""
_AHEAD = 3
"""Steps that the host may be ahead of the device in filling staging memory."""


class _Column:
    """The same tensor of every lane's batch, side by side on the device."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        first, lanes = tensors[0], len(tensors)
        self.block = torch.empty(lanes, *first.shape, dtype=first.dtype, device=device)
        self.places = self.block.unbind()
        self._staging: list[Tensor] = []
        if first.device.type == "cpu" and first.nbytes <= _STAGED and lanes > 1:
            self._staging = [
                torch.empty(self.block.shape, dtype=first.dtype, device="cpu", pin_memory=True) for _ in range(_AHEAD)
            ]

    def fill(self, tensors: list[Tensor], turn: int) -> None:
        if not self._staging or tensors[0].device.type != "cpu":
            for place, tensor in zip(self.places, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
            return
        torch.stack(tensors, out=self._staging[turn])
        self.block.copy_(self._staging[turn], non_blocking=True)


class GraphInputs:
    """Batches of some lanes at fixed places."""

    def __init__(self, batches: Sequence[LaneBatch], device: torch.device) -> None:
        rows = [list(leaves(batch.data)) for batch in batches]
        alike = len({signature(batch.data) for batch in batches}) == 1
        everything = range(len(batches))
        groups = [everything] if alike else [range(number, number + 1) for number in everything]
        self._columns = [
            (at, group, _Column([rows[number][at] for number in group], device))
            for group in groups
            for at, leaf in enumerate(rows[group.start])
            if isinstance(leaf, Tensor)
        ]
        places: list[dict[int, Tensor]] = [{} for _ in batches]
        for at, group, column in self._columns:
            for number, place in zip(group, column.places, strict=True):
                places[number][at] = place
        self.data = [_with_leaves(batch.data, found) for batch, found in zip(batches, places, strict=True)]
        """Each lane's data, with its tensors in this memory."""
        self._copied = [torch.cuda.Event() for _ in range(_AHEAD)]
        self._turn = 0

    def fill(self, batches: Sequence[LaneBatch]) -> None:
        """Put what these batches hold where the graph reads it."""
        turn, self._turn = self._turn, (self._turn + 1) % _AHEAD
        self._copied[turn].synchronize()  # of a step long past
        rows = [list(leaves(batch.data)) for batch in batches]
        for at, group, column in self._columns:
            column.fill([rows[number][at] for number in group], turn)
        self._copied[turn].record()


def _with_leaves(data: Any, places: Mapping[int, Tensor]) -> Any:
    numbers = count()
    return map_leaves(lambda leaf: places.get(next(numbers), leaf), data)
