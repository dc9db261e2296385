"""A ring buffer for the measurements of replayed CUDA graphs, kept for some steps without the host's help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RingRow(NamedTuple):
    """The numbers of one replay: those that it measured, among those that stay."""

    measured: Tensor
    """On the device."""
    known: Sequence[float]
    """All numbers, NaN where they are measured."""
    places: Sequence[int]
    """Where the measured ones belong."""

    def fill(self, numbers: Sequence[float]) -> list[float]:
        """Return all numbers, once the measured ones are read."""
        found = list(self.known)
        for place, number in zip(self.places, numbers, strict=True):
            found[place] = number
        return found

    def unread(self) -> list[Tensor | float]:
        """Return all numbers, the measured ones as tensors."""
        found: list[Tensor | float] = list(self.known)
        for place, number in zip(self.places, self.measured.unbind(), strict=True):
            found[place] = number
        return found


class StepStatsRing:
    """Rows of numbers that the replays of a graph write one after the other."""

    def __init__(self, rows: int, most: int, device: torch.device) -> None:
        # Outside of the capture: what is allocated inside may lie where earlier kernels of the same
        # graph write at each replay, and only one row is written anew.
        self._memory = torch.zeros(rows, most, dtype=torch.float64, device=device)
        self._order = torch.arange(rows, device=device).unsqueeze(1)
        self._at = torch.zeros((), dtype=torch.int64, device=device)
        """The row that the next replay writes."""
        self._rows: tuple[Tensor, ...] = ()
        self._turn = 0
        self._known: list[float] = []
        self._places: list[int] = []

    def write(self, values: Sequence[Tensor | float | None]) -> None:
        """Part of the graph: put these values into the next row, None as NaN.

        Few kernels for many values: each takes as long as one of a small model's.
        """
        known: list[float] = []
        parts: dict[torch.dtype, list[Tensor]] = {}
        places: dict[torch.dtype, list[int]] = {}
        for value in values:
            if not isinstance(value, Tensor):
                known.append(math.nan if value is None else float(value))
                continue
            parts.setdefault(value.dtype, []).append(value.reshape(-1))
            at = range(len(known), len(known) + value.numel())
            places.setdefault(value.dtype, []).extend(at)
            known += [math.nan] * len(at)
        by_type = [torch.cat(part).double() for part in parts.values()]
        row = torch.cat(by_type) if len(by_type) > 1 else by_type[0]
        memory = self._memory[:, : len(row)]
        torch.where(self._order == self._at, row, memory, out=memory)
        self._at.add_(1).remainder_(len(self._order))
        self._rows = memory.unbind()
        self._known, self._places = known, [at for part in places.values() for at in part]

    def next_row(self) -> RingRow:
        """Return what the replay that was just started measures; good until as many others have been."""
        row = self._rows[self._turn]
        self._turn = (self._turn + 1) % len(self._rows)
        return RingRow(row, self._known, self._places)
