"""The batches of one step on this rank: read when they are asked for, moved to the device once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from samestep.data.batch import LaneBatch, Moment, StepData
from samestep.distributed.context import RunContext
from samestep.distributed.health.activity import DATA
from samestep.errors import StepError
from samestep.pytree import map_leaves
from samestep.step.engine import StepEngine


class StepBatches:
    """Reads the batches of this rank's lanes, in their order."""

    def __init__(self, engine: StepEngine, data: StepData, moment: Moment) -> None:
        self._engine, self._data, self._moment = engine, data, moment
        self._read: list[LaneBatch] = []
        self._on_device: dict[int, LaneBatch] = {}
        self._over = False

    def read(self, position: int) -> LaneBatch:
        """Return the batch of one of this rank's lanes, as it was read."""
        if self._over:
            raise StepError(f"step {self._data.index} is over: its batches are gone")
        while len(self._read) <= position:
            engine, activity = self._engine, self._engine.setup.context.activity
            before = activity.enter(DATA)
            read = self._data.read()
            activity.enter(before)
            engine.guard.saw(self._data.index, read.lane, read.ids)
            engine.on_batch(self._data.index, read)
            self._read.append(read)
        return self._read[position]

    def read_all(self) -> list[LaneBatch]:
        """Return the batches of all of this rank's lanes, as they were read."""
        if self._data.units:
            self.read(len(self._data.units) - 1)
        return self._read

    def sizes(self) -> dict[int, int]:
        """Return the number of samples in each lane of this rank."""
        return {batch.lane: len(batch) for batch in self.read_all()}

    def on_device(self, batch: LaneBatch) -> LaneBatch:
        """Return a lane's batch where the run computes."""
        found = self._on_device.get(batch.lane)
        if found is None:
            data = self._engine.copies.to_device(batch.data)
            found = LaneBatch(batch.lane, data, batch.ids, self._moment)
            self._on_device[batch.lane] = found
        return found

    def spare(self) -> Any:
        """Return another rank's batch on ranks without samples, which must come to a loop's own lines.

        All ranks call this.
        """
        found = batch_of_another(self._engine.setup.context, self._data, lambda: self.read_all()[0].data)
        return None if self._data.units else self._engine.copies.to_device(found)

    def release(self) -> None:
        """Let go of the batches: the step is over."""
        self._read.clear()
        self._on_device.clear()
        self._over = True


def batch_of_another(context: RunContext, data: StepData, first: Callable[[], Any]) -> Any:
    """Return the batch of a rank with samples, on the host, if some rank has none. All ranks call this."""
    if data.ragged is False:
        return None
    have = context.gather(bool(data.units))
    data.ragged = not all(have)
    if not data.ragged:
        return None
    source = have.index(True)
    return context.broadcast(map_leaves(_on_host, first() if context.rank == source else None), source)


def _on_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf
