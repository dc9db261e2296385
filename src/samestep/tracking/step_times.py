"""Splits a run's time over phases, and names the rank that the others wait for."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from typing import Any

import torch

from samestep.distributed.health.activity import COMPUTE, DATA, EXCHANGE, READING, SAVE, UPDATE, Activity
from samestep.reduce.stats import RankFlags

_COLUMNS = {
    "time_data": (DATA,),
    "time_compute": (COMPUTE, UPDATE, READING),
    "time_exchange": (EXCHANGE,),
    "time_save": (SAVE,),
}
"""Reading losses waits for the device, which is computing."""
_ALWAYS = (SAVE, READING)
"""Timed whenever they happen; the other phases in some steps only."""


class StepTimes:
    """Adds up what steps cost between two readings, on this rank and on all."""

    def __init__(self, activity: Activity, device: torch.device) -> None:
        self._activity, self._device = activity, device
        self._seconds = dict(activity.seconds)
        self._timed = activity.timed_steps
        self._reported = activity.busy
        self._busy: list[float] = []

    def since_last_flags(self) -> float:
        """Seconds of work of this rank's own since the last call."""
        before, self._reported = self._reported, self._activity.busy
        return self._reported - before

    def add_busy(self, flags: Sequence[RankFlags]) -> None:
        """Add the work that each rank reported of itself."""
        if len(self._busy) != len(flags):
            self._busy = [0.0] * len(flags)
        for rank, reported in enumerate(flags):
            self._busy[rank] += reported.busy

    def row(self, steps: int, seconds: float, samples: int) -> dict[str, Any]:
        """Return what the steps since the last row cost, per step; then start over."""
        activity = self._activity
        activity.enter(activity.phase)  # the phase we are in counts up to now
        row: dict[str, Any] = {"samples_per_second": samples / seconds if seconds else 0.0}
        timed, self._timed = activity.timed_steps - self._timed, activity.timed_steps
        for column, phases in _COLUMNS.items() if timed else ():
            spent = {phase: activity.seconds[phase] - self._seconds[phase] for phase in phases}
            row[column] = sum(s / (steps if p in _ALWAYS else timed) for p, s in spent.items())
        if len(self._busy) > 1:
            slowest = max(range(len(self._busy)), key=self._busy.__getitem__)
            fastest = min(self._busy)
            row["slowest_rank"] = slowest
            row["rank_spread"] = self._busy[slowest] / fastest if fastest > 0 else 1.0
        row["peak_memory_mb"] = peak_memory(self._device) / 2**20
        self._seconds, self._busy = dict(activity.seconds), []
        return row


def peak_memory(device: torch.device) -> int:
    """Bytes at most in use so far: of the GPU, or of this process."""
    if device.type == "cuda":
        # What max_memory_allocated reads, without making a table of everything first.
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        return int(stats["allocated_bytes"]["all"]["peak"])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
