"""The data of a step: lane batches, and the run's position in its data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samestep.errors import TaskError
from samestep.pytree import leaves

Collate = Callable[[list[Any]], Any]
"""Makes a batch of a list of samples."""


@dataclass(frozen=True)
class Moment:
    """The position of a batch in a run, and the number of lanes; the same for all lanes of a step."""

    step: int = 0
    epoch: int = 0
    total_steps: int | None = None
    lane_count: int = 1


_FIRST = Moment()


@dataclass(frozen=True, init=False)
class LaneBatch:
    """One lane's samples of one step, collated, on the run's device.

    Example:
        def loss(self, model, batch):
            logits = model(batch.x)
            return F.cross_entropy(logits, batch.y, reduction="sum"), len(batch)
    """

    lane: int
    data: Any
    """What the collate function returned."""
    ids: tuple[Any, ...]
    """Which samples these are: dataset indices, or digests for iterable data."""
    moment: Moment = _FIRST
    """When it comes; see `step`, `epoch` and `progress`."""

    def __init__(self, lane: int, data: Any, ids: tuple[Any, ...], moment: Moment = _FIRST) -> None:
        # At once: each lane of each step makes two, and a frozen dataclass sets field by field.
        self.__dict__.update(lane=lane, data=data, ids=ids, moment=moment)

    @property
    def step(self) -> int:
        """The step's number in the run, from 0; in validation, the step that it follows."""
        return self.moment.step

    @property
    def epoch(self) -> int:
        """The epoch's number in the run, from 0."""
        return self.moment.epoch

    @property
    def progress(self) -> float:
        """Return how much of the run is over, from 0 to 1, for weights that change with it.

        Raises:
            TaskError: The length of the run is not known: it trains for epochs of iterable data.
        """
        if self.moment.total_steps is None:
            raise TaskError("batch.progress needs the number of steps: set steps, or steps_per_epoch, in the config")
        return self.moment.step / self.moment.total_steps

    @property
    def lanes(self) -> int:
        """The number of lanes of the whole global batch."""
        return self.moment.lane_count

    @property
    def device(self) -> torch.device:
        """Return where the batch's tensors are."""
        found = [leaf for leaf in leaves(self.data) if isinstance(leaf, Tensor)]
        return found[0].device if found else torch.device("cpu")

    @property
    def x(self) -> Any:
        """The first element of an (input, target) batch."""
        return self.data[0]

    @property
    def y(self) -> Any:
        """The second element of an (input, target) batch."""
        return self.data[1]

    @property
    def size(self) -> int:
        """The number of samples; with `batchnorm: global`, in each of a rank's lanes."""
        return len(self.ids)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.ids)


@dataclass(frozen=True)
class Position:
    """A run's position in its data: the next step to run."""

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    streams: Mapping[int, Any] = field(default_factory=dict)
    """By lane, the state of a stream that has one; other streams are read again on resume."""
    draws: tuple[int, ...] = ()
    """Where the loop's own draws began that came last, if it has a body."""


@dataclass(slots=True)
class StepData:
    """The data of one step, before its batches are read."""

    index: int
    epoch: int
    epoch_step: int
    ends_epoch: bool
    units: tuple[int, ...]
    """This rank's units (lanes, unless they are fused) that have samples in this step."""
    ragged: bool | None
    """Whether some rank has no samples at all in this step; None if no rank has asked the others."""
    read: Callable[[], LaneBatch]
    """Reads the batch of the next of those units."""
    streams: Mapping[int, Any] = field(default_factory=dict)
    """States of this rank's streams after this step, by lane."""
    draws: tuple[int, ...] = ()
    """Where the loop's own draws began that came last, if it has a body that is over."""
    total: int | None = None
    """Number of steps of the run, if that is known."""
    samples: Sequence[int] | None = None
    """Samples per unit of all ranks, where this rank knows them without asking the others."""

    @property
    def following(self) -> Position:
        """The position after this step, as far as this rank knows it."""
        if self.ends_epoch:
            return Position(self.index + 1, self.epoch + 1, 0, draws=self.draws)
        return Position(self.index + 1, self.epoch, self.epoch_step + 1, self.streams, self.draws)


class Source(ABC):
    """The source of the steps' data."""

    samples: int | None
    """Samples per epoch; None if that is known only at its end."""
    steps_per_epoch: int | None
    """Steps per epoch; None if that is known only at its end."""
    has_streams = False
    """Whether positions hold states of streams, which each rank knows only of its own lanes."""

    @abstractmethod
    def steps(self, start: Position, stop: int | None) -> Iterator[StepData]:
        """Steps from `start` up to step `stop` (or forever), epoch after epoch."""
