"""Validation data in batches, distributed to ranks: which samples a rank gets, and in which order they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from samestep.data.batch import Collate, LaneBatch, Moment
from samestep.data.loader_parts import evaluation_parts
from samestep.data.sequential import SequentialSource
from samestep.evaluation.eval_mode import BufferSnapshot, evaluating, refuse_changed
from samestep.lanes.plan import BatchPlan, LaneAssignment
from samestep.lanes.random_streams import BETWEEN
from samestep.run_setup import RunSetup

_EVALUATION = "evaluation"


def evaluation_setup(setup: RunSetup, batch: int | None = None) -> RunSetup:
    """Return the setup by which validation data is distributed: in lanes over all ranks, or all on rank 0."""
    config, lane_count = setup.config, setup.batch.lane_count
    size = batch or config.evaluation.batch or setup.batch.lane_batch
    by_rank = setup.assignment.by_rank
    if config.evaluation.mode == "rank0":
        none = range(lane_count, lane_count)
        by_rank = (range(lane_count), *[none] * (setup.context.world - 1))
    return replace(
        setup, planned=BatchPlan(size * lane_count, lane_count), assignment=LaneAssignment(by_rank, setup.context.rank)
    )


def enter_evaluation(setup: RunSetup, moment: Moment, stream: str = _EVALUATION) -> Callable[[int], None]:
    """Return what gives a batch random numbers of its own, called with its number."""
    return lambda number: setup.rng.enter(stream, at=(moment.step, number))


def evaluation_batches(
    setup: RunSetup, source: SequentialSource, moment: Moment, stream: str = _EVALUATION
) -> Iterator[LaneBatch]:
    """This rank's batches, each with random numbers of its own."""

    if source.takes_part:
        for batches in source.rounds(enter_evaluation(setup, moment, stream)):
            for batch in batches:
                setup.context.activity.moved()
                yield replace(batch, moment=moment)


@dataclass
class EvalShard:
    """A rank's share in a user's own loop over validation data."""

    moment: Moment
    ids: list[int] = field(default_factory=list)
    """Places of its samples in the dataset, in the order of the loop."""
    firsts: list[int] = field(default_factory=list)
    """Place of the first sample of each batch."""
    is_over: bool = False
    """Whether the loop has come to its end."""

    def loop(self, setup: RunSetup, modules: Sequence[nn.Module], data: Any, collate: Collate | None) -> Iterator[Any]:
        """Return the batches, on the device; the loop's body computes as an evaluation does."""
        size = None
        if isinstance(data, DataLoader):
            parts = evaluation_parts(data, setup)
            setup, data, collate, size = parts.setup, parts.dataset, parts.collate, data.batch_size
        dealt = evaluation_setup(setup, size)
        source = SequentialSource(dealt, data, "validation data", collate)
        return self._batches(dealt, modules, source)

    def _batches(self, setup: RunSetup, modules: Sequence[nn.Module], source: SequentialSource) -> Iterator[Any]:
        buffers = BufferSnapshot(modules)
        try:
            with evaluating(modules), torch.no_grad():
                for batch in evaluation_batches(setup, source, self.moment):
                    self.ids += batch.ids
                    self.firsts.append(batch.ids[0])
                    with setup.precision.forward():
                        yield batch.data
            self.is_over = True
            refuse_changed([buffers.changed()], "the loop over run.eval_batches")
        finally:
            setup.rng.enter(BETWEEN, at=(self.moment.step,))
