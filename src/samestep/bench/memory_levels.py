"""Reads a meter where the lanes of a step begin and end, and makes parts of a step's memory of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from samestep.bench.memory_meter import Meter
from samestep.data.batch import LaneBatch
from samestep.tracking.listeners import RunListener


@dataclass
class StepLevels:
    """Bytes that were held in a step, less those of its batches."""

    begins: list[int] = field(default_factory=list)
    """When each lane's forward pass began."""
    turns: list[int] = field(default_factory=list)
    """When each lane's forward pass was over."""
    end: int = 0
    """After the last lane's backward pass."""
    batches: int = 0
    peak: int = 0
    """With the batches."""

    @property
    def activations(self) -> int:
        """The most that a lane's forward pass kept."""
        pairs = zip(self.begins, self.turns, strict=True)
        return max((turn - begin for begin, turn in pairs), default=0)

    def gradients(self, by_tree: bool) -> int:
        """Return what lanes left, and the last one's own where those before it are kept apart.

        Args:
            by_tree: Whether a lane's gradients are added when it is over, not while they come.
        """
        if not self.begins:
            return 0
        left = [level - self.begins[0] for level in (*self.begins[1:], self.end)]
        if len(self.begins) == 1 or not by_tree:
            return max(left)
        return max(left[:-1]) + left[0]


class Levels(RunListener):
    """Watches the lanes of a run's steps: a `LaneWatch`, and a listener for their batches."""

    draws = False

    def __init__(self, meter: Meter, copies: bool) -> None:
        """Args:
        copies: Whether a batch is on the device only when its lane's forward pass has begun.
        """
        self._meter, self._copies = meter, copies
        self.last: LaneBatch | None = None
        """The first batch of the last step, before it is on the device."""
        self.step = StepLevels()
        self._sizes: list[int] = []

    def begin(self) -> None:
        """A new step."""
        self.step, self._sizes, self.last = StepLevels(), [], None
        self._meter.restart()

    def on_batch(self, step: int, batch: LaneBatch) -> None:
        self.last = self.last or batch
        self._sizes.append(self._meter.size_of(batch.data))

    def enter_lane(self, step: int, lane: int) -> None:
        copied = self._sizes[:-1] if self._copies else self._sizes
        self.step.begins.append(self._meter.held() - sum(copied))

    def forget_lane(self) -> None:
        self.step.begins.pop()
        self.step.begins.append(self._meter.held() - sum(self._sizes))

    def leave_lane(self, loss: Tensor | float, count: Tensor | float) -> None:
        self.step.turns.append(self._meter.held() - sum(self._sizes))

    def leave_lanes(self) -> None:
        self.step.end = self._meter.held() - sum(self._sizes)

    def summed(self, step: int) -> None:
        pass

    def finished(self) -> StepLevels:
        """Return the step is over."""
        self.step.batches, self.step.peak = sum(self._sizes), self._meter.peak()
        return self.step
