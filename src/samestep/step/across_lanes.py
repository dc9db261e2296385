"""What a loop has computed in its lanes, brought together from all ranks between two passes over them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from samestep.data.batch import StepData
from samestep.errors import StepError
from samestep.reduce.lane_rows import LaneRows
from samestep.reduce.lane_sum import sum_lanes
from samestep.run_setup import RunSetup


class GatheredRows(NamedTuple):
    """The rows of all lanes."""

    rows: Tensor
    """In the order of the lanes, the same on every rank, without a gradient."""
    mine: list[slice]
    """Where those of this rank's lanes are, one for each batch of `step.lanes`."""


class AcrossLanes:
    """Sums and gathers over the lanes of all ranks. Every rank makes the same calls."""

    def __init__(self, setup: RunSetup) -> None:
        context = setup.context
        self._assignment, self._collectives = setup.assignment.units, context.collectives
        self._device = context.device
        self._rows = LaneRows(self._assignment, self._collectives, self._device)

    def sum(self, data: StepData, values: Sequence[Tensor]) -> Tensor:
        """Over all lanes; see `Step.sum_over_lanes`."""
        mine = _by_lane("step.sum_over_lanes", data, values)
        return sum_lanes(mine, self._assignment, self._collectives, self._device)

    def gather(self, data: StepData, values: Sequence[Tensor], name: str) -> GatheredRows:
        """Of all lanes; see `Step.gather`."""
        mine = _by_lane("step.gather", data, values)
        samples = data.samples
        if samples is None:
            samples = self._rows.share_samples({lane: len(value) for lane, value in mine.items()})
        rows = self._rows.gather(name, samples, mine)
        per_sample = len(rows) // sum(samples)
        ends = list(accumulate(count * per_sample for count in samples))
        return GatheredRows(
            rows, [slice(ends[lane] - len(mine[lane]), ends[lane]) for lane in data.units]
        )


def _by_lane(call: str, data: StepData, values: Sequence[Tensor]) -> dict[int, Tensor]:
    if len(values) != len(data.units):
        raise StepError(
            f"{call} got {len(values)} tensors for {len(data.units)} lanes of this rank: give one for "
            "each batch of step.lanes"
        )
    return dict(zip(data.units, values, strict=True))
