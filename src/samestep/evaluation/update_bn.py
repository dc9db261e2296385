"""BatchNorm's statistics measured again, for weights that no step of the training had."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.data.batch import Collate, LaneBatch
from samestep.data.factory import first_epoch, open_source
from samestep.data.orders import Order
from samestep.evaluation.eval_mode import BufferSnapshot, evaluating
from samestep.optim.precision import Precision
from samestep.run_setup import RunSetup

Forward = Callable[[nn.Module, LaneBatch], Any]
"""Puts a training batch through the model, as a task's loss does."""
Sums = list[Tensor]
"""For each layer: the weighted sums of its means and of its variances, and the weights."""

_STATISTICS = "statistics"


def measure_batchnorm(
    setup: RunSetup,
    modules: Sequence[nn.Module],
    forward: Forward,
    dataset: Any,
    order: Order | None,
    collate: Collate | None,
) -> bool:
    """Put the statistics of the training set in place of the model's; False if it has none.

    The set is read as in the first epoch: with its augmentation, and in its order, since batches
    of a set that is sorted by class would vary too little. Layers that the training keeps in
    evaluation mode keep their statistics.

    Args:
        modules: The model, and the extra modules: these keep their statistics, since no average
            is made of their weights.
    """
    model = modules[0]
    layers = _layers(model)
    if not layers:
        return False
    # Whole lanes also at `same: samples`, so that the result is the lanes' and not the ranks'.
    setup = replace(setup, assignment=replace(setup.assignment, fused=False))
    source = open_source(setup, dataset, order, collate)
    batches = first_epoch(source, setup, _STATISTICS)
    with _only_statistics(modules, layers), torch.no_grad():
        mine = _sums_by_lane(model, forward, layers, batches, setup.precision)
    gathered = setup.context.gather([(lane, [t.cpu() for t in sums]) for lane, sums in mine.items()])
    by_lane = sorted((entry for rank in gathered for entry in rank), key=lambda entry: entry[0])
    _put(layers, [sums for _, sums in by_lane])
    return True


def _layers(model: nn.Module) -> list[_BatchNorm]:
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.training
    ]


@contextmanager
def _only_statistics(modules: Sequence[nn.Module], layers: list[_BatchNorm]) -> Iterator[None]:
    """These layers normalise by the batch; all else is as in evaluation, and afterwards as before.

    Dropout too: the statistics are for a model that is evaluated, and it has none there.
    """
    momenta = [layer.momentum for layer in layers]
    forwards = [vars(layer).get("forward") for layer in layers]
    buffers = BufferSnapshot(modules)
    with evaluating(modules):
        for layer in layers:
            layer.training, layer.momentum = True, None
            # Not one that would wait for ranks which have no batch at this moment.
            layer.forward = partial(_BatchNorm.forward, layer)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer, momentum, forward in zip(layers, momenta, forwards, strict=True):
                layer.momentum = momentum
                del layer.forward
                if forward is not None:
                    layer.forward = forward  # type: ignore[method-assign]
            buffers.restore()


def _sums_by_lane(
    model: nn.Module, forward: Forward, layers: list[_BatchNorm], batches: Iterable[LaneBatch], precision: Precision
) -> dict[int, Sums]:
    sums: dict[int, Sums] = {}
    for batch in batches:
        for layer in layers:
            layer.reset_running_stats()
        with precision.forward():
            forward(model, batch)
        found = [row for layer in layers for row in _weighted(layer, len(batch))]
        if batch.lane in sums:
            torch._foreach_add_(sums[batch.lane], found)
        else:
            sums[batch.lane] = found
    return sums


def _weighted(layer: _BatchNorm, samples: int) -> Iterator[Tensor]:
    """Yield a batch's mean and variance by its number of samples; by 0 if it did not pass this layer."""
    mean, variance, calls = layer.running_mean, layer.running_var, layer.num_batches_tracked
    assert mean is not None
    assert variance is not None
    assert calls is not None
    weight = samples * (calls > 0).to(torch.float64)
    yield mean.to(torch.float64) * weight
    yield variance.to(torch.float64) * weight
    yield weight


def _put(layers: list[_BatchNorm], lanes: list[Sums]) -> None:
    totals = [reduce(torch.add, parts) for parts in zip(*lanes, strict=True)]
    for number, layer in enumerate(layers):
        mean, variance, weight = totals[3 * number : 3 * number + 3]
        if weight > 0:
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.copy_(mean / weight)
            layer.running_var.copy_(variance / weight)
