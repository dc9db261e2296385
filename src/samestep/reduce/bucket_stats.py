"""Losses, counts and flags that travel in a gradient bucket: they need no collective of their own.

Every lane and every rank has slots in the bucket, which all other ranks leave at zero: the bucket's
sum holds their numbers to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import c_float

import torch
from torch import Tensor

from samestep.reduce.stats import LaneStats, LocalStats, RankFlags, ReadFlags, RowStats, stack_stats

PIECES = 3
"""Numbers of a bucket's type that hold one float64: 24 + 24 + 5 bits are 53."""
_PAIR = 2 * PIECES


def slots(lanes: int, world: int) -> int:
    """Numbers of a bucket that all of a step's bucket_stats need."""
    return _PAIR * (lanes + world)


class BucketStats:
    """The slots of one bucket, on this rank.

    In host memory there are few of them, and a call of torch or numpy costs more than their numbers do. For a bucket
    on a GPU nothing here waits.
    """

    def __init__(self, places: Tensor, mine: range, lanes: int, rank: int, on_host: bool) -> None:
        """Args:
        places: All slots of the bucket: the lanes' first, then the ranks'.
        mine: The lanes of this rank.
        lanes: Of all ranks.
        rank: This one.
        on_host: Whether the bucket is in host memory.
        """
        self._places = places
        self._memory = places.numpy() if on_host else None
        self._lanes = lanes
        self._my_lanes = slice(_PAIR * mine.start, _PAIR * mine.stop)
        self._my_flags = slice(_PAIR * (lanes + rank), _PAIR * (lanes + rank + 1))
        self._narrow = _as_float32 if places.dtype == torch.float32 else float
        self._waiting: tuple[Sequence[LaneStats], RankFlags] | None = None

    def attach(self, lanes: Sequence[LaneStats], flags: RankFlags) -> LocalStats:
        """Send these with the bucket when it leaves; what is returned has all ranks' once it is back."""
        self._waiting = lanes, flags
        return self._next_stats()

    def write(self) -> None:
        """The bucket leaves: write what was to be taken along."""
        if self._waiting is not None:
            lanes, flags = self._waiting
            self._waiting = None
            self.write_lanes(lanes)
            self._write_flags(flags)

    def write_lanes(self, lanes: Sequence[LaneStats]) -> None:
        """Write these lanes' losses and counts, and nothing for anybody else."""
        self._places.zero_()
        if self._memory is None:
            pieces = _cut_tensor(stack_stats(lanes, self._places.device), self._places.dtype)
            self._places[self._my_lanes].copy_(pieces)
        else:
            self._memory[self._my_lanes] = _cut_pairs(lanes, self._narrow)

    def write_flags(self, flags: RankFlags) -> LocalStats:
        """Write this rank's flags beside lanes that are written; returns what `attach` does."""
        self._write_flags(flags)
        return self._next_stats()

    def arrive(self) -> None:
        """The bucket is back: take the numbers out of it, whose memory the next step needs."""
        self._stats.arrive(self._places)

    def _next_stats(self) -> LocalStats:
        """Return what the next arrival fills."""
        self._stats = _DeviceStats(self._lanes) if self._memory is None else _HostStats(self._lanes)
        return self._stats

    def _write_flags(self, flags: RankFlags) -> None:
        pieces = _cut_pairs([flags], self._narrow)
        if self._memory is None:  # cut on the host: one copy in place of a dozen kernels
            self._places[self._my_flags].copy_(torch.tensor(pieces, dtype=self._places.dtype), non_blocking=True)
        else:
            self._memory[self._my_flags] = pieces


def _cut_tensor(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float64 values as `PIECES` numbers of a narrower type whose sum they are."""
    pieces = []
    for _ in range(PIECES):
        piece = values.to(dtype)
        pieces.append(piece)
        values = torch.where(piece.isfinite(), values - piece, 0.0)
    return torch.stack(pieces, dim=-1).flatten()


class _DeviceStats(RowStats):
    def __init__(self, lanes: int) -> None:
        """Nothing has arrived yet."""
        self._lane_count = lanes

    def arrive(self, pieces: Tensor) -> None:
        rows = pieces.view(-1, 2, PIECES).to(torch.float64).sum(dim=-1)
        self._rows, self._flag_rows = rows[: self._lane_count], rows[self._lane_count :]


def _cut_pairs(rows: Sequence[LaneStats | RankFlags], narrow: Callable[[float], float]) -> list[float]:
    return [piece for row in rows for value in row.pair for piece in _cut(float(value), narrow)]


def _cut(value: float, narrow: Callable[[float], float]) -> list[float]:
    pieces = []
    for _ in range(PIECES):
        piece = narrow(value)
        pieces.append(piece)
        value = value - piece if math.isfinite(piece) else 0.0
    return pieces


def _as_float32(value: float) -> float:
    return c_float(value).value


class _HostStats(LocalStats):
    def __init__(self, lanes: int) -> None:
        """Nothing has arrived yet."""
        self._lane_count = lanes

    def arrive(self, places: Tensor) -> None:
        pieces = places.tolist()
        columns = (pieces[number::PIECES] for number in range(PIECES))
        numbers: list[float] = [high + middle + low for high, middle, low in zip(*columns, strict=True)]
        pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
        self._lanes = [LaneStats(*pair) for pair in pairs[: self._lane_count]]
        self._ranks = [RankFlags(*pair) for pair in pairs[self._lane_count :]]

    def flags(self) -> ReadFlags:
        return lambda: self._ranks

    @property
    def no_requests(self) -> bool:
        return False
