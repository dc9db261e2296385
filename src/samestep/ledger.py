"""What each step measured: kept on the device, read in bulk, written by rank 0."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from samestep.errors import TaskError
from samestep.plan import LaneTree
from samestep.runtime.lanestats import LocalStats, read_numbers
from samestep.runtime.pulse import READING, Pulse


@dataclass(frozen=True)
class StepRecord:
    """One step as it was measured."""

    step: int
    epoch: int
    loss: float
    count: float
    lr: tuple[float, ...]
    grad_norm: float | None
    seconds: float
    """Mean wall time of the steps read together with this one."""
    bad_lanes: tuple[int, ...] = ()
    """Lanes whose loss is NaN or infinite."""
    skipped: bool = False
    """Whether the step changed nothing for that reason."""

    def values(self) -> dict[str, Any]:
        """The record as a line of metrics.jsonl."""
        row: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "loss": self.loss,
            "count": self.count,
            "lr": self.lr[0] if len(self.lr) == 1 else list(self.lr),
            "seconds": self.seconds,
        }
        if self.grad_norm is not None:
            row["grad_norm"] = self.grad_norm
        if self.skipped:
            row["skipped"] = True
        return row


class _Pending(NamedTuple):
    step: int
    epoch: int
    stats: LocalStats
    lr: tuple[float, ...]
    norm: Tensor | None
    skipped: bool


class Ledger:
    """Collects what steps measured and reads it every `every` steps, all at once."""

    def __init__(
        self, every: int, write: Callable[[Sequence[StepRecord]], None], pulse: Pulse
    ) -> None:
        self._every = every
        self._write = write
        self._pulse = pulse
        self._pending: list[_Pending] = []
        self._since = time.perf_counter()

    def add(
        self,
        step: int,
        epoch: int,
        stats: LocalStats,
        lr: Sequence[float],
        norm: Tensor | None,
        skipped: bool,
    ) -> None:
        self._pending.append(_Pending(step, epoch, stats, tuple(lr), norm, skipped))
        if len(self._pending) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Read and write everything measured so far. This waits for the device."""
        if not self._pending:
            return
        entries, self._pending = self._pending, []
        measured = [entry.stats.values() for entry in entries]
        with self._pulse.during(READING):
            numbers = iter(read_numbers([value for values in measured for value in values]))
            norms = read_numbers([entry.norm for entry in entries])
        lanes = [[next(numbers) for _ in values] for values in measured]
        seconds = (time.perf_counter() - self._since) / len(entries)
        records = []
        for entry, values, norm in zip(entries, lanes, norms, strict=True):
            loss, total = _mean_loss(values)
            if total == 0:
                raise TaskError(
                    f"step {entry.step} counted nothing: no lane had samples (is steps_per_epoch "
                    "beyond the data?) or every count was 0"
                )
            records.append(
                StepRecord(
                    entry.step,
                    entry.epoch,
                    loss,
                    total,
                    entry.lr,
                    None if entry.norm is None else norm,
                    seconds,
                    tuple(i for i, lane in enumerate(values[::2]) if not math.isfinite(lane)),
                    entry.skipped,
                )
            )
        self._write(records)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave what happened since the last step out of the steps' times."""
        self._since = time.perf_counter()


def _mean_loss(values: Sequence[float]) -> tuple[float, float]:
    """The step's loss per counted thing, summed over the lanes in the tree's order; the count."""
    tree: LaneTree[float] = LaneTree(lambda left, right: left + right)
    total = 0.0
    for lane, (loss, count) in enumerate(zip(values[::2], values[1::2], strict=True)):
        tree.push(lane, 1, loss)
        total += count
    return (tree.close() / total if total else 0.0), total
