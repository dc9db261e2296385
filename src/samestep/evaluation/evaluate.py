"""Every validation sample exactly once, sharded by lanes, the same result on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.batch import Collate, LaneBatch, Moment
from samestep.data.sequential import SequentialSource
from samestep.evaluation.eval_batches import evaluation_batches, evaluation_setup
from samestep.evaluation.eval_mode import BufferSnapshot, evaluating, refuse_changed
from samestep.evaluation.metrics import LaneMetrics, merge_lanes, mergers_of
from samestep.lanes.random_streams import METRICS
from samestep.run_setup import RunSetup
from samestep.step.loss_terms import LossValue

Measure = Callable[[nn.Module, LaneBatch, Mapping[str, Any]], LossValue]
Values = dict[str, float | list[float]]


class Evaluator:
    """Measures a model on a dataset, sharded by lanes or wholly on rank 0."""

    def __init__(self, setup: RunSetup, modules: Sequence[nn.Module]) -> None:
        self._modules, self._setup = modules, evaluation_setup(setup)

    def run(
        self, dataset: Any, measure: Measure, metrics: Mapping[str, Any], collate: Collate | None, moment: Moment
    ) -> Values:
        """Return the dataset's loss and metrics; the same numbers on every rank and any world."""
        setup, mergers = self._setup, mergers_of(metrics)
        source = SequentialSource(setup, dataset, "validation data", collate)
        by_lane = {lane: LaneMetrics(mergers, setup.context.device) for lane in source.units}
        buffers = BufferSnapshot(self._modules)
        with evaluating(self._modules), torch.no_grad():
            for batch in evaluation_batches(setup, source, moment):
                mine = by_lane[batch.lane]
                with setup.precision.forward():
                    loss = measure(self._modules[0], batch, mine.metrics)
                if isinstance(loss, Tensor):  # a mean over the batch's samples
                    loss = (loss * len(batch), len(batch))
                mine.add_loss(loss)
        my_states = [(number, lane.state()) for number, lane in by_lane.items()]
        gathered = setup.context.gather((buffers.changed(), my_states))
        refuse_changed((changed for changed, _ in gathered), "the evaluation")
        states = sorted((lane for _, lanes in gathered for lane in lanes), key=lambda lane: lane[0])
        # Some metrics draw when they are computed, and this rank is at its last batch's stream.
        setup.rng.enter(METRICS, at=(moment.step, 1))
        values = merge_lanes(mergers, [state for _, state in states], setup.config.loss_weights)
        if any(isinstance(value, float) and math.isnan(value) for value in values.values()):
            setup.context.log.warn(f"evaluation at step {moment.step} gave NaN: {values}")
        return values
