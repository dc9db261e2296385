"""A dataset gone through once, in its own order, every sample exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from samestep.config import Config
from samestep.data.batch import Collate, LaneBatch, Lanes, Position, StepData
from samestep.data.device import DeviceCopies
from samestep.data.map_style import MapSource, is_map_style
from samestep.data.orders import sequential
from samestep.errors import TaskError
from samestep.lanes.plan import BatchPlan, EpochPlan
from samestep.lanes.rng import DATA, derive, seed_at


class SequentialSource(MapSource):
    """Numbered batches, dealt out to lanes; what is drawn for one follows from its number.

    So the lanes and ranks that it is cut into change nothing but who does the work.
    """

    def __init__(
        self,
        dataset: Any,
        what: str,
        batch: BatchPlan,
        lanes: Lanes,
        config: Config,
        pin_memory: bool,
        collate: Collate | None,
    ) -> None:
        if not is_map_style(dataset):
            raise TaskError(
                f"{what} must have a length and be indexable, unlike {type(dataset).__name__}: "
                "each sample is taken exactly once"
            )
        if not len(dataset):
            raise TaskError(f"{what} holds no samples: its length is 0")
        order, plan = sequential(len(dataset)), EpochPlan(len(dataset), batch)
        super().__init__(
            dataset, order, plan, lanes, config.seed, config.loader, pin_memory, collate
        )

    def rounds(
        self, draw_from: Callable[[int], None], device: torch.device
    ) -> Iterator[Iterator[LaneBatch]]:
        """This rank's batches of each round, to be read before the next: one per filled lane.

        `draw_from` is called with a batch's number before it is given out.
        """
        copies = DeviceCopies(device)
        for data in self.steps(Position(), self.plan.steps):
            yield self._round(data, draw_from, copies)

    def _round(
        self, data: StepData, draw_from: Callable[[int], None], copies: DeviceCopies
    ) -> Iterator[LaneBatch]:
        for lane in data.lanes:
            batch = data.read()
            draw_from(self._number(lane, data.epoch_step))
            yield LaneBatch(lane, copies.to_device(batch.data), batch.ids)

    def _number(self, lane: int, epoch_step: int) -> int:
        return epoch_step * self.plan.batch.lanes + lane

    def _draws_from(self, unit: int, epoch: int, epoch_step: int) -> int:
        return seed_at(derive(self._seed, DATA, "in order"), self._number(unit, epoch_step))
