"""Decides whether data is the bottleneck of a step, and which workers to take. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.bench.statistics import WORTH


@dataclass(frozen=True)
class Reading:
    """One way to read, and what it takes for a step."""

    workers: int
    prefetch: int
    """0 without workers: nothing is read ahead."""
    data: float
    """Seconds for a step's batches, as fast as they come."""
    rest: float
    """Seconds of the rest of a step."""

    @property
    def step(self) -> float:
        """Seconds of a step: workers read while it computes, without them it waits."""
        return max(self.data, self.rest) if self.workers else self.data + self.rest

    @property
    def is_bottleneck(self) -> bool:
        """Return whether steps wait for data for more than a tenth of the rest."""
        return self.step > WORTH * self.rest

    @property
    def overrides(self) -> list[str]:
        """Return what to set for it."""
        ahead = [f"loader.prefetch={self.prefetch}"] if self.workers else []
        return [f"loader.workers={self.workers}", *ahead]


def recommended(readings: Sequence[Reading]) -> Reading:
    """Return the one with the fewest workers, and the least read ahead, among those that are as fast as any."""
    fastest = min(reading.step for reading in readings)
    good = [reading for reading in readings if reading.step <= WORTH * fastest]
    return min(good, key=lambda reading: (reading.workers, reading.prefetch))


def settings(workers: Sequence[int], prefetch: Sequence[int]) -> list[tuple[int, int]]:
    """Return what is tried: every number of workers with everything read ahead, no workers once."""
    found = [(count, ahead if count else 0) for count in workers for ahead in prefetch]
    return list(dict.fromkeys(found))
