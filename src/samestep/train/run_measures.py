"""How a run's loop measures: on validation data, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from samestep.data.batch import Collate, Moment
from samestep.data.orders import Order
from samestep.distributed.health.activity import EVALUATE
from samestep.errors import StepError
from samestep.lanes.rng import BETWEEN
from samestep.train.batchnorm import Forward, measure_batchnorm
from samestep.train.evaluate import Evaluator, Measure, Values
from samestep.train.run_files import RunFiles


class RunMeasures(RunFiles):
    """What a loop calls to evaluate."""

    def evaluate(
        self,
        dataset: Any,
        measure: Measure,
        metrics: Mapping[str, Any] | None = None,
        collate: Collate | None = None,
        step: int = 0,
        prefix: str = "",
    ) -> Values:
        """Measure the model on a dataset: each sample once, the same result on every rank.

        Args:
            dataset: A map-style dataset.
            measure: `measure(model, batch, metrics)` updates the metrics and returns the loss as
                (sum, count). It gets the unwrapped model.
            metrics: By name, of torchmetrics, or with `update`, `compute` and a way to merge.
            collate: Makes a batch of a list of samples; torch's default unless given.
            step: The step after which this is measured; random numbers follow from it.
            prefix: Put before every name in the result.

        Returns:
            `val_loss` and every metric, by name; a value inside a metric's result is `NAME/KEY`.
        """
        if self._prepared is None:
            raise StepError("run.evaluate came before run.prepare: prepare the model first")
        self.flush()
        evaluator = Evaluator(self.setup, self._modules)
        moment = Moment(step, lane_count=self.batch.lane_count)
        if self._passes is not None:
            moment = replace(self._passes.moment, step=step)
        with self.context.activity.during(EVALUATE):
            found = evaluator.run(dataset, measure, metrics or {}, collate, moment)
        values = {f"{prefix}{name}": value for name, value in found.items()}
        self.setup.rng.enter(BETWEEN, at=(step,))
        self._parts.log.restart_clock()
        self._listeners.on_evaluation(step, values)
        return values

    def measure_batchnorm(
        self,
        dataset: Any,
        forward: Forward,
        order: Order | None = None,
        collate: Collate | None = None,
    ) -> bool:
        """Measure the statistics of the model's BatchNorm again, over the training set.

        Args:
            dataset: The training set.
            forward: `forward(model, batch)` puts a batch through the model.
            order: In which order samples are visited; shuffled unless given.
            collate: Makes a batch of a list of samples; torch's default unless given.

        Returns:
            False if the model has no BatchNorm.
        """
        with self.context.activity.during(EVALUATE):
            found = measure_batchnorm(self.setup, self._modules, forward, dataset, order, collate)
        self.setup.rng.enter(BETWEEN)
        self._parts.log.restart_clock()
        return found
