"""Example inputs: real batches of the task's data, of several sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from samestep.config import Config
from samestep.data.batch import LaneBatch
from samestep.data.device import DeviceCopies
from samestep.data.iterable import lane_streams
from samestep.data.map_style import is_map_style
from samestep.errors import TaskError
from samestep.lanes.random_streams import DATA, derive, reseed
from samestep.train.task import Task

FORWARD = "forward"
_LARGEST = 32
"""Samples per batch, at most: enough to compare two models."""

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Examples:
    """Batches of three sizes: an exported model must accept any."""

    source: str
    """Which of the task's datasets they are from."""
    sizes: tuple[int, ...]
    inputs: Mapping[str, tuple[Inputs, ...]]
    """By method, its arguments for each of the batches."""

    def dynamic_axes(self, method: str = FORWARD) -> list[set[int]]:
        """Return, per argument, the axes whose length is not the same in all batches."""
        return varying_axes(self.inputs[method])


def varying_axes(batches: Sequence[Sequence[Tensor]]) -> list[set[int]]:
    """Return, per n, the axes in which the n-th tensors of the batches differ in length."""
    return [_varying([tensor.shape for tensor in same]) for same in zip(*batches, strict=True)]


def _varying(shapes: Sequence[torch.Size]) -> set[int]:
    if len({len(shape) for shape in shapes}) > 1:  # a batch of one whose axis was squeezed away
        return set(range(len(shapes[0])))
    return {axis for axis, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1}


def read_examples(task: Task, config: Config, methods: Sequence[str], device: torch.device) -> Examples:
    """Batches of the validation set, or else of the training set, as arguments of the methods."""
    task.prepare_data()
    source, dataset = "validation", task.valid_data()
    if dataset is None:
        source, dataset = "training", task.train_data()
    largest = max(3, min(config.batch_plan(world=1).lane_batch, _LARGEST))
    # The last has the size that a deployed model sees most often, and that graphs specialise on.
    sizes = (largest, largest // 2 + 1, 1)
    reseed(derive(config.seed, DATA, "export"))
    read = _sample_reader(dataset, sum(sizes), config)
    batches, start = [], 0
    for size in sizes:
        data = task.collate(read(range(start, start + size)))
        batches.append(LaneBatch(0, DeviceCopies(device).to_device(data), tuple(range(start, start + size))))
        start += size
    inputs = {method: tuple(_arguments(task, batch, method) for batch in batches) for method in methods}
    return Examples(source, sizes, inputs)


def _sample_reader(dataset: Any, count: int, config: Config) -> Callable[[range], list[Any]]:
    """Reads samples by number; numbers wrap around at the end of a short dataset."""
    if is_map_style(dataset):
        fetch_many = getattr(dataset, "__getitems__", None)
        length = len(dataset)
    else:
        samples = list(islice(_stream(dataset, config), count))
        dataset, fetch_many, length = samples, None, len(samples)
    if not length:
        raise TaskError("the data hold no sample to test the exported model with")

    def read(numbers: range) -> list[Any]:
        indices = [number % length for number in numbers]
        if fetch_many is not None:
            return list(fetch_many(indices))
        return [dataset[index] for index in indices]

    return read


def _stream(dataset: Any, config: Config) -> Iterator[Any]:
    lane_count = config.lane_count(world=1)
    return iter(lane_streams(dataset).lane_stream(0, lane_count, config.seed, 0))


def _arguments(task: Task, batch: LaneBatch, method: str) -> Inputs:
    given = task.model_inputs(batch, method)
    inputs = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    others = [type(value).__name__ for value in inputs if not isinstance(value, Tensor)]
    if others or not inputs:
        raise TaskError(
            f"{type(task).__name__}.model_inputs returned {', '.join(others) or 'nothing'} for "
            f"{method}, and an exported model takes tensors: override model_inputs(self, batch, method) to "
            "return a tensor or a tuple of tensors, and export_model(self, model) if the model "
            "is called otherwise"
        )
    # With separate memory: exporters treat arguments that share one tensor as related.
    return tuple(value.clone() for value in inputs)
