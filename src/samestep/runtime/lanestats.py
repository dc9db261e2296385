"""The losses and counts of one step's lanes: on the device until somebody reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samestep.runtime.peers import naming_lost_peers

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class LaneStats:
    """A lane's summed loss and what it was summed over; an empty lane has (0, 0)."""

    loss: Tensor | float
    count: Tensor | float


EMPTY = LaneStats(0.0, 0.0)


class LocalStats:
    """The stats of all lanes, when all lanes are here."""

    def __init__(self, lanes: Sequence[LaneStats]) -> None:
        self._lanes = lanes

    def inverse_count(self, device: torch.device) -> Tensor | float:
        """1 / the step's whole count, 0 if that is 0; never synchronises with a GPU."""
        total: Tensor | float = 0.0
        for lane in self._lanes:
            total = total + lane.count
        return inverse(total, device)

    def values(self) -> list[Tensor | float]:
        """Each lane's loss and count, one after the other, in lane order."""
        return [value for lane in self._lanes for value in (lane.loss, lane.count)]


def stack_stats(lanes: Sequence[LaneStats], device: torch.device) -> Tensor:
    """The lanes' (loss, count) as float64 rows on the device; never waits for a GPU."""
    if device.type == "cpu":
        numbers = [(float(stats.loss), float(stats.count)) for stats in lanes]
        return torch.tensor(numbers, dtype=torch.float64)
    rows = torch.zeros(len(lanes), 2, dtype=torch.float64, device=device)
    for row, stats in zip(rows, lanes, strict=True):
        for place, value in zip(row, (stats.loss, stats.count), strict=True):
            if isinstance(value, Tensor):
                place.copy_(value)
            elif value:
                place.fill_(value)
    return rows


PIECES = 3
"""Numbers of a bucket's type that hold one float64: 24 + 24 + 5 bits are 53."""


def cut(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float64 values as `PIECES` numbers of a narrower type whose sum they are."""
    pieces = []
    for _ in range(PIECES):
        piece = values.to(dtype)
        pieces.append(piece)
        values = torch.where(piece.isfinite(), values - piece, 0.0)
    return torch.stack(pieces, dim=-1).flatten()


class RowStats(LocalStats):
    """The stats of all lanes as rows of (loss, count), once they are here."""

    _rows: Tensor

    def inverse_count(self, device: torch.device) -> Tensor | float:
        if self._rows.device.type == "cpu":
            return inverse(sum(self._rows[..., 1].flatten().tolist()), device)
        return inverse(self._rows[..., 1].sum(), device)

    def values(self) -> list[Tensor | float]:
        return list(self._rows.flatten().tolist())


class RidingStats(RowStats):
    """The stats of all lanes, when they travel in a gradient bucket.

    Every lane has numbers of its own there, which all other ranks leave at zero: the
    bucket's sum holds them to the bit.
    """

    def __init__(self) -> None:
        """Nothing has arrived yet."""

    def arrive(self, pieces: Tensor) -> None:
        """Take the numbers out of the bucket, whose memory the next step needs."""
        self._rows = pieces.view(-1, 2, PIECES).to(torch.float64).sum(dim=-1)


class GatheredStats(RowStats):
    """The stats of all lanes, on their way from all ranks by a collective of their own."""

    def __init__(
        self, everyone: Tensor, mine: Tensor, work: dist.Work, counts: Sequence[int]
    ) -> None:
        self._rows = everyone.view(len(counts), -1, 2)
        self._in_flight = (everyone, mine)  # see exchange.py on who frees them
        self._work = work
        self._counts = counts

    def inverse_count(self, device: torch.device) -> Tensor | float:
        self._wait()
        return super().inverse_count(device)

    def values(self) -> list[Tensor | float]:
        self._wait()
        rows = zip(self._rows.tolist(), self._counts, strict=True)
        return [value for held, here in rows for lane in held[:here] for value in lane]

    def _wait(self) -> None:
        with naming_lost_peers():
            self._work.wait()


def inverse(total: Tensor | float, device: torch.device) -> Tensor | float:
    """1 / total, or 0, in the form that gives the same bits on one process and on many."""
    if device.type == "cpu":
        number = float(total)
        return 1.0 / number if number else 0.0
    if not isinstance(total, Tensor):
        return torch.full((), 1.0 / total if total else 0.0, dtype=torch.float32, device=device)
    return torch.where(total > 0, total.double().reciprocal(), 0.0).to(torch.float32)


def read_numbers(values: Sequence[Tensor | float | None]) -> list[float]:
    """The values as numbers, None as NaN, with one wait for the device for all of a type."""
    numbers = [math.nan if v is None or isinstance(v, Tensor) else float(v) for v in values]
    by_type: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            by_type.setdefault((value.dtype, value.device), []).append(place)
    for places in by_type.values():
        read = torch.stack([values[place] for place in places]).tolist()  # type: ignore[misc]
        for place, number in zip(places, read, strict=True):
            numbers[place] = float(number)
    return numbers
