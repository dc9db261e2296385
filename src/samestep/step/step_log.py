"""The measurements of each step: kept on the device, read in bulk, written by rank 0."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from samestep.distributed.health.activity import READING, Activity
from samestep.errors import TaskError
from samestep.lanes.tree import sum_of_lanes
from samestep.optim.update import Updated
from samestep.reduce.stats import LocalStats, begin_reading, sum_of_counts
from samestep.step.loss_terms import TermSums

KEPT_STEPS = 256
"""Steps whose numbers stay on the device. Half of them are read at a time, at least."""


@dataclass(slots=True)
class StepRecord:
    """One step as it was measured."""

    step: int
    epoch: int
    loss: float
    count: float
    lr: tuple[float, ...]
    grad_norm: float | tuple[float, ...] | None
    """Before clipping; one for each parameter group with clip.per_group."""
    seconds: float
    """Mean wall time of the steps read together with this one."""
    bad_lanes: tuple[int, ...] = ()
    """Lanes whose loss is NaN or infinite."""
    skipped: bool = False
    """Whether the step changed nothing, since it was not finite."""
    loss_scale: float | None = None
    losses: Mapping[str, float] = field(default_factory=dict)
    """The losses that have names, each the mean over its own count."""

    def values(self) -> dict[str, Any]:
        """Return the record as a line of metrics.jsonl."""
        row: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "loss": self.loss,
            "count": self.count,
            "lr": self.lr[0] if len(self.lr) == 1 else list(self.lr),
            "seconds": self.seconds,
        }
        if self.grad_norm is not None:
            several = isinstance(self.grad_norm, tuple)
            row["grad_norm"] = list(self.grad_norm) if several else self.grad_norm  # type: ignore[arg-type]
        row |= {f"loss/{name}": value for name, value in self.losses.items()}
        if self.loss_scale is not None:
            row["loss_scale"] = self.loss_scale
        if self.skipped:
            row["skipped"] = True
        return row


class _Pending(NamedTuple):
    step: int
    epoch: int
    stats: LocalStats
    updated: Updated
    terms: TermSums | None


class _Reading(NamedTuple):
    entries: Sequence[_Pending]
    counts: Sequence[int]
    numbers: Callable[[], list[float]]
    in_flight: bool
    seconds: float


class StepLog:
    """Collects what steps measured and reads it every `every` steps, all at once.

    On a GPU nothing waits for it: what is requested after one such period is written after
    the next, or by `flush`.
    """

    def __init__(self, every: int, write: Callable[[Sequence[StepRecord]], None], activity: Activity) -> None:
        self._every = min(every, KEPT_STEPS // 2)
        self._write = write
        self._activity = activity
        self._pending: list[_Pending] = []
        self._reading: _Reading | None = None
        self._since = time.perf_counter()

    def add(self, step: int, epoch: int, stats: LocalStats, updated: Updated, terms: TermSums | None = None) -> None:
        self._pending.append(_Pending(step, epoch, stats, updated, terms))
        if len(self._pending) >= self._every:
            self._write_requested()
            self._request()
            if self._reading is not None and not self._reading.in_flight:
                self._write_requested()

    def flush(self) -> None:
        """Read and write everything measured so far. This waits for the device."""
        self._write_requested()
        self._request()
        self._write_requested()
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave what happened since the last step out of the steps' times."""
        self._since = time.perf_counter()

    def _request(self) -> None:
        """Begin to read what is pending."""
        if not self._pending:
            return
        entries, self._pending = self._pending, []
        seconds = (time.perf_counter() - self._since) / len(entries)
        self.restart_clock()
        values = [_measured(entry) for entry in entries]
        numbers, in_flight = begin_reading([value for row in values for value in row])
        counts = [sum(map(_size, row)) for row in values]
        self._reading = _Reading(entries, counts, numbers, in_flight, seconds)

    def _write_requested(self) -> None:
        reading, self._reading = self._reading, None
        if reading is None:
            return
        with self._activity.during(READING):
            numbers = iter(reading.numbers())
        rows = [[next(numbers) for _ in range(count)] for count in reading.counts]
        records = [_record(entry, row, reading.seconds) for entry, row in zip(reading.entries, rows, strict=True)]
        self._write(records)


def _measured(entry: _Pending) -> Sequence[Tensor | float | None]:
    if entry.updated.numbers is not None:
        return (entry.updated.numbers.measured,)
    return step_numbers(entry.updated, entry.terms, entry.stats)


def step_numbers(updated: Updated, terms: TermSums | None, stats: LocalStats) -> list[Tensor | float | None]:
    """Return the numbers of a step: skipped, scale, norms, named losses, and the lanes' losses and counts."""
    skipped = 0.0 if updated.skipped is None else updated.skipped
    norms = () if updated.norms is None else (updated.norms,)
    named = () if terms is None else (terms.sums,)
    return [skipped, updated.scale, *norms, *named, *stats.values()]


def _size(value: Tensor | float | None) -> int:
    return value.numel() if isinstance(value, Tensor) else 1


def _record(entry: _Pending, row: Sequence[float], seconds: float) -> StepRecord:
    updated = entry.updated
    if updated.numbers is not None:
        row = updated.numbers.fill(row)
    several = 0 if updated.norms is None else updated.norms.numel()
    norms, rest = tuple(row[2 : 2 + several]), row[2 + several :]
    named = 0 if entry.terms is None else len(entry.terms.names)
    sums, values = rest[:named], rest[named:]
    loss, total = _mean_loss(values)
    if total == 0:
        raise TaskError(
            f"step {entry.step} counted nothing: no lane had samples (is steps_per_epoch beyond the data?), or every count "
            "was 0"
        )
    return StepRecord(
        step=entry.step,
        epoch=entry.epoch,
        loss=loss,
        count=total,
        lr=updated.rates,
        grad_norm=None if not norms else norms if updated.norms.dim() else norms[0],  # type: ignore[union-attr]
        seconds=seconds,
        bad_lanes=tuple(i for i, lane in enumerate(values[::2]) if not math.isfinite(lane)),
        skipped=bool(row[0]),
        loss_scale=None if updated.scale is None else row[1],
        losses={} if entry.terms is None else _named_means(entry.terms, sums, total),
    )


def _named_means(terms: TermSums, sums: Sequence[float], count: float) -> dict[str, float]:
    columns = zip(terms.names, sums, terms.ratios, strict=True)
    return {name: value / (ratio * count) for name, value, ratio in columns}


def _mean_loss(values: Sequence[float]) -> tuple[float, float]:
    """Return the step's loss per counted thing, summed over the lanes in the tree's order; the count."""
    total = float(sum_of_counts(values[1::2]))
    return (sum_of_lanes(values[::2]) / total if total else 0.0), total
