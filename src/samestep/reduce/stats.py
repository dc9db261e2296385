"""The measurements of one step on all ranks: the lanes' losses and counts, and the flags of each rank.

They stay on the device until they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samestep.distributed.collectives import TorchCollectives
from samestep.distributed.health.activity import Activity
from samestep.lanes.tree import sum_of_lanes

if TYPE_CHECKING:
    import torch.distributed as dist


Pair = tuple[Tensor | float, Tensor | float]


@dataclass(slots=True)
class LaneStats:
    """A lane's summed loss and what it was summed over; an empty lane has (0, 0)."""

    loss: Tensor | float
    count: Tensor | float

    @property
    def pair(self) -> Pair:
        return self.loss, self.count


@dataclass(frozen=True)
class RankFlags:
    """The flags that a rank sends to all others with every step."""

    flag: float = 0.0
    """What it requests of all ranks at the end of this step; 0 for nothing."""
    busy: float = 0.0
    """Seconds that this rank itself worked since its last flags."""

    @property
    def pair(self) -> Pair:
        return self.flag, self.busy


EMPTY = LaneStats(0.0, 0.0)
NO_FLAGS = RankFlags()

ReadFlags = Callable[[], list[RankFlags]]


class LocalStats:
    """The stats of all lanes, when all lanes are here."""

    def __init__(self, lanes: Sequence[LaneStats], flags: RankFlags) -> None:
        self._lanes = lanes
        self._flags = flags

    def count(self) -> Tensor | float:
        """Return what the step's losses were summed over in all; never synchronises with a GPU."""
        return sum_of_counts([lane.count for lane in self._lanes])

    def losses(self) -> list[Tensor | float]:
        """Numbers that are all finite only if every lane's loss is; never waits for a GPU."""
        return [lane.loss for lane in self._lanes]

    def values(self) -> list[Tensor | float]:
        """Return each lane's loss and count, one after the other, in lane order."""
        return [value for lane in self._lanes for value in lane.pair]

    def flags(self) -> ReadFlags:
        """Begin to read each rank's flags; the result waits for the device if it must."""
        return lambda: [self._flags]

    @property
    def no_requests(self) -> bool:
        """Return whether it is already known that no rank requests anything."""
        return self._flags is NO_FLAGS

    @property
    def flags_wait(self) -> bool:
        """Return whether reading the flags at once would wait for a GPU. The same on every rank."""
        return False


def sum_of_counts(counts: Sequence[Tensor | float]) -> Tensor | float:
    """Return the sum in this order, on any Python: from 3.12 on, `sum` makes up for rounding."""
    total: Tensor | float = 0.0
    for count in counts:
        total = total + (count.double() if isinstance(count, Tensor) else count)
    return total


def stack_stats(lanes: Sequence[LaneStats | RankFlags], device: torch.device) -> Tensor:
    """Pairs of numbers as float64 rows on the device; never waits for a GPU."""
    if device.type == "cpu":
        numbers = [[float(value) for value in stats.pair] for stats in lanes]
        return torch.tensor(numbers, dtype=torch.float64)
    rows = torch.zeros(len(lanes), 2, dtype=torch.float64, device=device)
    for row, stats in zip(rows, lanes, strict=True):
        for place, value in zip(row, stats.pair, strict=True):
            if isinstance(value, Tensor):
                place.copy_(value)
            elif value:
                place.fill_(value)
    return rows


class RowStats(LocalStats):
    """The stats of all lanes and the flags of all ranks as rows of two, once they are here."""

    _rows: Tensor
    """The lanes' (loss, count)."""
    _flag_rows: Tensor
    """The ranks' (flag, busy)."""

    def count(self) -> Tensor | float:
        counts = self._rows[..., 1]
        if counts.device.type == "cpu":
            return sum_of_counts(counts.flatten().tolist())
        return counts.sum()

    def losses(self) -> list[Tensor | float]:
        losses = self._rows[..., 0]
        if losses.device.type == "cpu":
            return list(losses.flatten().tolist())
        return [losses.sum()]

    def values(self) -> list[Tensor | float]:
        return _numbers(self._rows)

    def flags(self) -> ReadFlags:
        if not self.flags_wait:
            return lambda: _as_flags(self._flag_rows)
        here, copied = to_host(self._flag_rows)

        def read() -> list[RankFlags]:
            if copied is not None:
                copied.synchronize()
            return _as_flags(here)

        return read

    @property
    def no_requests(self) -> bool:
        return False

    @property
    def flags_wait(self) -> bool:
        return self._flag_rows.device.type != "cpu"


def _numbers(rows: Tensor) -> list[Tensor | float]:
    """One after the other: numbers from the host at once, unread tensors from a GPU."""
    flat = rows.flatten()
    return list(flat.tolist()) if flat.device.type == "cpu" else list(flat.unbind())


def _as_flags(rows: Tensor) -> list[RankFlags]:
    return [RankFlags(flag, busy) for flag, busy in rows.tolist()]


class GatheredStats(RowStats):
    """The stats of all lanes, on their way from all ranks by a collective of their own."""

    def __init__(
        self, everyone: Tensor, mine: Tensor, work: dist.Work, assignment: Sequence[range], activity: Activity
    ) -> None:
        rows = everyone.view(len(assignment), -1, 2)
        self._rows, self._flag_rows = rows[:, :-1], rows[:, -1]
        self._in_flight = (everyone, mine)  # see exchange.py on who frees them
        self._work: dist.Work | None = work
        self._assignment = assignment
        self._activity = activity

    def count(self) -> Tensor | float:
        self._wait()
        return super().count()

    def losses(self) -> list[Tensor | float]:
        self._wait()
        return super().losses()

    def values(self) -> list[Tensor | float]:
        self._wait()
        return super().values()

    def flags(self) -> ReadFlags:
        self._wait()
        return super().flags()

    def _wait(self) -> None:
        if self._work is not None:
            with self._activity.waiting("losses"):
                self._work.wait()
            self._work = None
            if self._assignment[0].step > 1:  # ranks take lanes in turn
                lanes = sum(map(len, self._assignment))
                self._rows = self._rows.transpose(0, 1).flatten(0, 1)[:lanes]
            else:
                held = zip(self._rows, self._assignment, strict=True)
                self._rows = torch.cat([rows[: len(lanes)] for rows, lanes in held])


class ReplayedStats(LocalStats):
    """The stats of all lanes in a step that was replayed as a CUDA graph."""

    def __init__(
        self, numbers: Callable[[], list[Tensor | float]], lane_numbers: int, recorded: LocalStats, flags: RankFlags
    ) -> None:
        """Args:
        numbers: What the step measured, in memory of its own; the lanes' numbers last.
        lane_numbers: How many these are, two for each lane.
        recorded: The stats that were recorded; its tensors hold what the last replay measured.
        flags: This rank's own.
        """
        self._numbers, self._lane_numbers = numbers, lane_numbers
        self._recorded, self._flags = recorded, flags

    def count(self) -> Tensor | float:
        return sum_of_counts(self.values()[1::2])

    def losses(self) -> list[Tensor | float]:
        return self.values()[::2]

    def values(self) -> list[Tensor | float]:
        return self._numbers()[-self._lane_numbers :]

    def flags(self) -> ReadFlags:
        return self._recorded.flags() if self.flags_wait else lambda: [self._flags]

    @property
    def no_requests(self) -> bool:
        return not self.flags_wait and self._flags is NO_FLAGS

    @property
    def flags_wait(self) -> bool:
        return self._recorded.flags_wait


def gather_stats(
    collectives: TorchCollectives, lanes: Sequence[LaneStats], flags: RankFlags, assignment: Sequence[range]
) -> GatheredStats:
    """Start sending this rank's lanes' losses and its flags to all ranks; does not wait."""
    most = max(map(len, assignment))
    padded: list[LaneStats | RankFlags] = [*lanes, *[EMPTY] * (most - len(lanes)), flags]
    mine = stack_stats(padded, collectives.wire(collectives.device)).view(-1)
    everyone = mine.new_empty(collectives.world * mine.numel())
    work = collectives.all_gather(everyone, mine, "losses")
    return GatheredStats(everyone, mine, work, assignment, collectives.activity)


def inverse(total: Tensor | float, device: torch.device) -> Tensor | float:
    """1 / total, or 0, in the form that gives the same bits on one process and on many."""
    if device.type == "cpu":
        number = float(total)
        return 1.0 / number if number else 0.0
    if not isinstance(total, Tensor):
        return torch.full((), 1.0 / total if total else 0.0, dtype=torch.float32, device=device)
    return torch.where(total > 0, total.double().reciprocal(), 0.0).to(torch.float32)


def read_numbers(values: Sequence[Tensor | float | None]) -> list[float]:
    """Return the values as numbers, None as NaN; waits for the device once."""
    return begin_reading(values)[0]()


def begin_reading(values: Sequence[Tensor | float | None]) -> tuple[Callable[[], list[float]], bool]:
    """Start copying values to the host; returns what waits for them, and whether it would wait.

    A tensor counts for as many numbers as it has elements.
    """
    numbers: list[float] = []
    by_type: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[int]]] = {}
    for value in values:
        if not isinstance(value, Tensor):
            numbers.append(math.nan if value is None else float(value))
            continue
        parts, places = by_type.setdefault((value.dtype, value.device), ([], []))
        parts.append(value.reshape(-1))
        places += range(len(numbers), len(numbers) + value.numel())
        numbers += [math.nan] * value.numel()
    copies = [(places, to_host(torch.cat(parts))) for parts, places in by_type.values()]
    events = [event for _, (_, event) in copies if event is not None]

    def read() -> list[float]:
        for event in events:
            event.synchronize()
        for places, (copy, _) in copies:
            for place, number in zip(places, copy.tolist(), strict=True):
                numbers[place] = float(number)
        return numbers

    return read, bool(events)


def to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Return the values in host memory, once the event has happened."""
    if values.device.type == "cpu":
        return values, None
    here = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    here.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return here, copied


def mean_loss(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return the loss per counted thing of a step, added up in the tree's order; never waits for a GPU.

    Args:
        values: Each lane's loss and count, one after the other.
        device: Where the mean is wanted.
    """
    loss, counts = _add_up(values[::2]), values[1::2]
    # In the order of the log, where that costs nothing.
    total = _add_up(counts) if any(isinstance(count, Tensor) for count in counts) else sum_of_counts(counts)
    if not isinstance(total, Tensor):
        # As a tensor: a GPU divides by a number by multiplying with its inverse, which rounds once more.
        total = torch.full((), total, dtype=torch.float64, device=device)
    return torch.as_tensor(loss, dtype=torch.float64, device=device) / total


def _add_up(values: Sequence[Tensor | float]) -> Tensor | float:
    """Return the sum of all lanes in the tree's order."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return sum_of_lanes([float(value) for value in values])
    device = tensors[0].device
    scalars = (
        value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64, device=device)
        for value in values
    )
    return sum_of_rows(torch.stack(tuple(scalars)).double())


def sum_of_rows(rows: Tensor) -> Tensor:
    """Return the sum of one row per lane in the tree's order: level by level, in a few kernels."""
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        pairs = rows[:even:2] + rows[1:even:2]
        rows = pairs if even == len(rows) else torch.cat([pairs, rows[even:]])
    return rows[0]
