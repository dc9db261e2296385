"""Every validation sample exactly once, the same result on every rank: measured by lanes, or gathered on rank 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.batch import Collate, LaneBatch, Moment
from samestep.data.sequential import SequentialSource
from samestep.errors import TaskError
from samestep.evaluation.eval_batches import enter_evaluation, evaluation_batches, evaluation_setup
from samestep.evaluation.eval_mode import BufferSnapshot, evaluating, refuse_changed
from samestep.evaluation.metrics import LaneMetrics, flatten, merge_lanes, mergers_of
from samestep.lanes.random_streams import METRICS
from samestep.pytree import leaves, map_leaves
from samestep.run_setup import RunSetup
from samestep.step.loss_terms import LossValue

Measure = Callable[[nn.Module, LaneBatch, Mapping[str, Any]], LossValue]
Values = dict[str, float | list[float]]
Outputs = Callable[[nn.Module, LaneBatch], Any]
"""Gives what is wanted of a batch: tensors or lists with one entry per sample, in containers."""


def evaluate(
    setup: RunSetup,
    modules: Sequence[nn.Module],
    moment: Moment,
    dataset: Any,
    measure: Measure,
    metrics: Mapping[str, Any],
    collate: Collate | None,
) -> Values:
    """Return a dataset's loss and metrics, sharded by lanes or wholly on rank 0; the same numbers in any world."""
    setup, mergers = evaluation_setup(setup), mergers_of(metrics)
    source = SequentialSource(setup, dataset, "validation data", collate)
    by_lane = {lane: LaneMetrics(mergers, setup.context.device) for lane in source.units}
    buffers = BufferSnapshot(modules)
    with evaluating(modules), torch.no_grad():
        for batch in evaluation_batches(setup, source, moment):
            mine = by_lane[batch.lane]
            with setup.precision.forward():
                loss = measure(modules[0], batch, mine.metrics)
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


def evaluate_gathered(
    setup: RunSetup,
    modules: Sequence[nn.Module],
    moment: Moment,
    dataset: Any,
    outputs: Outputs,
    compute: Callable[[Any], Mapping[str, Any]],
    collate: Collate | None,
) -> Values:
    """Bring the outputs for a dataset to rank 0, round by round; return on every rank what `compute` returns there."""
    setup, context = evaluation_setup(setup), setup.context
    source = SequentialSource(setup, dataset, "validation data", collate)
    buffers = BufferSnapshot(modules)
    parts: list[Any] = []

    def outputs_of(batch: LaneBatch) -> Any:
        with setup.precision.forward():
            found = outputs(modules[0], batch)
        return map_leaves(lambda leaf: _checked(leaf, batch), found)

    with evaluating(modules), torch.no_grad():
        for batches in source.rounds(enter_evaluation(setup, moment)):
            mine = [outputs_of(batch) for batch in batches]
            parts += [part for rank in context.collectives.collect(mine) for part in rank]
    refuse_changed(context.gather(buffers.changed()), "the evaluation")
    setup.rng.enter(METRICS, at=(moment.step, 1))
    values = flatten(_mapping(compute(_joined(parts)))) if context.is_main else {}
    return context.broadcast(values)


def _checked(leaf: Any, batch: LaneBatch) -> Tensor:
    """Return a tensor of outputs, in host memory, where rank 0 collects them."""
    if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != len(batch):
        found = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
        raise TaskError(
            f"eval_outputs must return tensors with a row for each of a batch's {len(batch)} samples, and "
            f"returned {found}"
        )
    return leaf.detach().cpu()


def _joined(parts: Sequence[Any]) -> Any:
    """Return the outputs of all batches, in the containers of the first."""
    columns = [leaves(part) for part in parts]
    if len({len(column) for column in columns}) > 1:
        raise TaskError("eval_outputs returned more tensors for some batches than for others")
    whole = iter([torch.cat(column) for column in zip(*columns, strict=True)])
    return map_leaves(lambda leaf: next(whole), parts[0])


def _mapping(values: Any) -> Mapping[str, Any]:
    if not isinstance(values, Mapping) or not values:
        raise TaskError(
            f"evaluate_gathered must return values by name, such as {{'auc': 0.9}}, and returned {values!r}"
        )
    return values
