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


class GatheredStats(LocalStats):
    """The stats of all lanes, on their way from all ranks."""

    def __init__(
        self, everyone: Tensor, mine: Tensor, work: dist.Work, counts: Sequence[int]
    ) -> None:
        self._rows = everyone.view(len(counts), -1, 2)
        self._in_flight = (everyone, mine)  # see exchange.py on who frees them
        self._work = work
        self._counts = counts

    def inverse_count(self, device: torch.device) -> Tensor | float:
        self._wait()
        total = self._rows[..., 1].sum()
        return inverse(total.item() if total.device.type == "cpu" else total, device)

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
