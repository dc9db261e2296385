"""Every validation sample exactly once, sharded by lanes, the same result on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samestep.config import Config
from samestep.data.batch import Collate, LaneBatch, Lanes
from samestep.data.device import pins_memory
from samestep.data.sequential import SequentialSource
from samestep.distributed.context import RunContext
from samestep.lanes.plan import BatchPlan
from samestep.lanes.rng import Streams
from samestep.optim.precision import choose_precision
from samestep.train.metrics import LaneMetrics, merge_lanes

if TYPE_CHECKING:
    from torchmetrics import Metric

Measure = Callable[[nn.Module, LaneBatch, "Mapping[str, Metric]"], tuple[Tensor, Tensor | float]]
Values = dict[str, float | list[float]]

_EVALUATION = "evaluation"


class Evaluator:
    """Measures a model on a dataset, sharded by lanes or wholly on rank 0."""

    def __init__(
        self,
        config: Config,
        context: RunContext,
        batch: BatchPlan,
        assignment: Sequence[range],
        streams: Streams,
    ) -> None:
        self._config, self._context, self._streams = config, context, streams
        self._precision = choose_precision(config.precision, context.device)
        self._pin_memory = pins_memory(config.loader, context.device)
        lane_batch = config.evaluation.batch or batch.lane_batch
        self._batch = BatchPlan(lane_batch * batch.lanes, batch.lanes)
        if config.evaluation.mode == "rank0":
            nobody = range(batch.lanes, batch.lanes)
            assignment = [range(batch.lanes), *[nobody] * (context.world - 1)]
        self._lanes = Lanes(tuple(assignment), context.rank)

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
        whole = SequentialSource(
            dataset, "validation data", self._batch, self._lanes, self._config, self._pin_memory,
            collate,
        )  # fmt: skip
        lanes = {lane: LaneMetrics(metrics, self._context.device) for lane in self._lanes.mine}
        with _evaluating(model), torch.no_grad():
            for batch in self._batches(whole, step):
                mine = lanes[batch.lane]
                with self._precision.forward():
                    mine.add_loss(*measure(model, batch, mine.metrics))
        told = self._context.gather([(lane, lanes[lane].state()) for lane in lanes])
        by_lane = sorted((entry for rank in told for entry in rank), key=lambda entry: entry[0])
        return merge_lanes(metrics, [state for _, state in by_lane])

    def _batches(self, whole: SequentialSource, step: int) -> Iterator[LaneBatch]:
        def draw_from(number: int) -> None:
            self._streams.enter(_EVALUATION, at=(step, number))

        if self._lanes.mine:
            for lanes in whole.rounds(draw_from, self._context.device):
                yield from lanes


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
