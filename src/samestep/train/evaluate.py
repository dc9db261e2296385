"""Every validation sample exactly once, sharded by lanes, the same result on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samestep.data.batch import Collate, LaneBatch
from samestep.data.sequential import SequentialSource
from samestep.lanes.assignment import LaneAssignment
from samestep.lanes.plan import BatchPlan
from samestep.run_setup import RunSetup
from samestep.train.metrics import LaneMetrics, merge_lanes

if TYPE_CHECKING:
    from torchmetrics import Metric

Measure = Callable[[nn.Module, LaneBatch, "Mapping[str, Metric]"], tuple[Tensor, Tensor | float]]
Values = dict[str, float | list[float]]

_EVALUATION = "evaluation"


class Evaluator:
    """Measures a model on a dataset, sharded by lanes or wholly on rank 0."""

    def __init__(self, setup: RunSetup) -> None:
        config, lane_count = setup.config, setup.batch.lane_count
        lane_batch = config.evaluation.batch or setup.batch.lane_batch
        by_rank = setup.assignment.by_rank
        if config.evaluation.mode == "rank0":
            none = range(lane_count, lane_count)
            by_rank = (range(lane_count), *[none] * (setup.context.world - 1))
        self._setup = replace(
            setup,
            batch=BatchPlan(lane_batch * lane_count, lane_count),
            assignment=LaneAssignment(by_rank, setup.context.rank),
        )

    def run(
        self,
        model: nn.Module,
        dataset: Any,
        measure: Measure,
        metrics: Mapping[str, Metric],
        collate: Collate | None,
        step: int,
    ) -> Values:
        """The dataset's loss and metrics; the same numbers on every rank and any world."""
        setup, my_lanes = self._setup, self._setup.assignment.my_units
        source = SequentialSource(setup, dataset, "validation data", collate)
        by_lane = {lane: LaneMetrics(metrics, setup.context.device) for lane in my_lanes}
        with _evaluating(model), torch.no_grad():
            for batch in self._batches(source, step):
                mine = by_lane[batch.lane]
                with setup.precision.forward():
                    mine.add_loss(*measure(model, batch, mine.metrics))
        gathered = setup.context.gather([(lane, by_lane[lane].state()) for lane in by_lane])
        states = sorted((entry for rank in gathered for entry in rank), key=lambda entry: entry[0])
        return merge_lanes(metrics, [state for _, state in states])

    def _batches(self, source: SequentialSource, step: int) -> Iterator[LaneBatch]:
        def enter_stream(number: int) -> None:
            self._setup.rng.enter(_EVALUATION, at=(step, number))

        if self._setup.assignment.my_units:
            for batches in source.rounds(enter_stream):
                yield from batches


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards each submodule's own mode again."""
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in training:
            module.training = mode
