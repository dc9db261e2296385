"""A metric of the whole validation set: outputs of all ranks on rank 0, in order, measured once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.batch import Collate, LaneBatch, Moment
from samestep.data.sequential import SequentialSource
from samestep.errors import TaskError
from samestep.evaluation.eval_batches import enter_evaluation, evaluation_setup
from samestep.evaluation.eval_mode import BufferSnapshot, evaluating, refuse_changed
from samestep.evaluation.metrics import flatten
from samestep.lanes.random_streams import METRICS
from samestep.pytree import leaves, map_leaves
from samestep.run_setup import RunSetup

Outputs = Callable[[nn.Module, LaneBatch], Any]
"""Gives what is wanted of a batch: tensors or lists with one entry per sample, in containers."""


class GatheredEvaluator:
    """Brings a model's outputs for a dataset to rank 0, round by round."""

    def __init__(self, setup: RunSetup, modules: Sequence[nn.Module], moment: Moment) -> None:
        self._setup, self._modules, self._moment = evaluation_setup(setup), modules, moment

    def run(
        self, dataset: Any, outputs: Outputs, compute: Callable[[Any], Mapping[str, Any]], collate: Collate | None
    ) -> dict[str, float | list[float]]:
        """Return what `compute` returns on rank 0, on every rank."""
        context = self._setup.context
        source = SequentialSource(self._setup, dataset, "validation data", collate)
        buffers = BufferSnapshot(self._modules)
        parts: list[Any] = []
        enter = enter_evaluation(self._setup, self._moment)
        with evaluating(self._modules), torch.no_grad():
            for batches in source.rounds(enter):
                mine = [self._outputs(outputs, batch) for batch in batches]
                parts += [part for rank in context.collectives.collect(mine) for part in rank]
        refuse_changed(context.gather(buffers.changed()), "the evaluation")
        self._setup.rng.enter(METRICS, at=(self._moment.step, 1))
        values = flatten(_mapping(compute(_joined(parts)))) if context.is_main else {}
        return context.broadcast(values)

    def _outputs(self, outputs: Outputs, batch: LaneBatch) -> Any:
        with self._setup.precision.forward():
            found = outputs(self._modules[0], batch)
        return map_leaves(lambda leaf: _checked(leaf, batch), found)


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
