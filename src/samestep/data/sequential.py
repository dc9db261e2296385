"""A dataset read once, in its own order, every sample exactly once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from samestep.data.batch import Collate, LaneBatch, Position, StepData
from samestep.data.device import DeviceCopies
from samestep.data.map_style import MapSource, is_map_style
from samestep.data.orders import sequential
from samestep.errors import TaskError
from samestep.lanes.plan import BatchPlan, EpochPlan, deal_fewer
from samestep.lanes.random_streams import DATA, derive, seed_at
from samestep.run_setup import RunSetup


def _without_empty_lanes(setup: RunSetup, samples: int) -> RunSetup:
    """Return the setup with no more lanes than there are batches: else the first ranks would get them all.

    Batches are numbered through all rounds: another number of lanes is the same batches.
    """
    size, most = setup.batch.lane_batch, setup.batch.lane_count
    lanes = min(most, math.ceil(samples / size))
    if lanes == most:
        return setup
    assignment = setup.assignment
    by_rank = tuple(deal_fewer(lanes, assignment.by_rank))
    return replace(setup, planned=BatchPlan(size * lanes, lanes), assignment=replace(assignment, by_rank=by_rank))


class SequentialSource(MapSource):
    """Numbered batches, distributed to lanes; a batch's random numbers follow from its number.

    So the lanes and ranks that share the work do not change its result.
    """

    def __init__(self, setup: RunSetup, dataset: Any, what: str, collate: Collate | None) -> None:
        if not is_map_style(dataset):
            raise TaskError(
                f"{what} must have a length and be indexable, unlike {type(dataset).__name__}: "
                "each sample is taken exactly once"
            )
        if not len(dataset):
            raise TaskError(f"{what} holds no samples: its length is 0")
        setup = _without_empty_lanes(setup, len(dataset))
        order, plan = sequential(len(dataset)), EpochPlan(len(dataset), setup.batch)
        super().__init__(setup, dataset, order, plan, collate)

    @property
    def units(self) -> range:
        """This rank's lanes; empty if there are fewer batches than ranks."""
        return self._assignment.my_units

    def rounds(self, enter_stream: Callable[[int], None]) -> Iterator[Iterator[LaneBatch]]:
        """This rank's batches of each round, one per lane with samples."""
        copies = DeviceCopies(self._setup.context.device)
        for data in self.steps(Position(), self.plan.steps):
            yield self._round(data, enter_stream, copies)

    def _round(self, data: StepData, enter_stream: Callable[[int], None], copies: DeviceCopies) -> Iterator[LaneBatch]:
        for unit in self._setup.passes(data.units, data.samples):
            batch = data.read()
            enter_stream(self._number(unit, data.epoch_step))
            yield LaneBatch(unit, copies.to_device(batch.data), batch.ids)

    @property
    def takes_part(self) -> bool:
        """Return whether this rank takes part in the rounds: by batches, or by weights that others gather."""
        return bool(self.units) or self._setup.gathered.weights is not None

    def _number(self, unit: int, epoch_step: int) -> int:
        return epoch_step * self.plan.batch.lane_count + unit

    def _seed_of(self, unit: int, epoch: int, epoch_step: int) -> int:
        root = derive(self._setup.config.seed, DATA, "in order")
        return seed_at(root, self._number(unit, epoch_step))
