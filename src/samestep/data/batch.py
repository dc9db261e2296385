"""What a step's data consists of: lane batches, where the run stands in its data, who reads what."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class LaneBatch:
    """One lane's samples of one step, collated, on the run's device."""

    lane: int
    data: Any
    ids: tuple[Any, ...]
    """Which samples these are: dataset indices, or digests for iterable data."""

    @property
    def x(self) -> Any:
        """The first element of a (input, target) batch."""
        return self.data[0]

    @property
    def y(self) -> Any:
        """The second element of a (input, target) batch."""
        return self.data[1]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Position:
    """Where a run stands in its data: the next step to run."""

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    streams: Mapping[int, Any] = field(default_factory=dict)
    """By lane, the state of a stream that can say and take one; other streams are read again."""


@dataclass(slots=True)
class StepData:
    """What one step consists of, before its batches are read."""

    index: int
    epoch: int
    epoch_step: int
    ends_epoch: bool
    lanes: tuple[int, ...]
    """This rank's lanes that have samples in this step."""
    ragged: bool
    """Whether some rank has no samples at all in this step."""
    read: Callable[[], LaneBatch]
    """The next of those lanes' batches."""
    streams: Mapping[int, Any] = field(default_factory=dict)
    """States of this rank's streams after this step, by lane."""

    @property
    def following(self) -> Position:
        """Where the run stands after this step, as far as this rank knows."""
        if self.ends_epoch:
            return Position(self.index + 1, self.epoch + 1, 0)
        return Position(self.index + 1, self.epoch, self.epoch_step + 1, self.streams)


@dataclass(frozen=True)
class Lanes:
    """Who drives what: the lanes of each rank, and how they are cut out of the plan's lanes."""

    assignment: tuple[range, ...]
    rank: int
    fused: bool = False
    """A rank's lanes are one batch (`same: samples`)."""

    @property
    def units(self) -> tuple[range, ...]:
        """What each rank runs one after the other: its lanes, or all of them at once."""
        if self.fused:
            return tuple(range(rank, rank + 1) for rank in range(len(self.assignment)))
        return self.assignment

    @property
    def mine(self) -> range:
        return self.units[self.rank]

    def plan_lanes(self, unit: int) -> range:
        """The plan's lanes that a unit covers."""
        return self.assignment[unit] if self.fused else range(unit, unit + 1)


class Source(ABC):
    """Where steps come from."""

    has_streams = False
    """Whether positions hold states of streams, which each rank knows only of its own lanes."""

    @abstractmethod
    def steps(self, start: Position, stop: int | None) -> Iterator[StepData]:
        """Steps from `start` up to step `stop` (or for ever), epoch after epoch."""
