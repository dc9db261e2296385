"""Times trained models for a sample alone, and for a batch, on this machine.

All of them are held at once, and their measurements are interleaved: whatever else the machine does meanwhile, it does to all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from samestep.data.batch import LaneBatch
from samestep.data.sequential import SequentialSource
from samestep.distributed.context import RunContext
from samestep.distributed.timed_calls import synchronize
from samestep.lanes.plan import BatchPlan
from samestep.models.trained_model import Opened, open_trained
from samestep.run_setup import RunSetup

_WARM_UP = 3
"""The first calls of a model allocate, and choose kernels."""
_ROUNDS, _FEWEST_ROUNDS = 31, 5
_SECONDS = 60.0
"""After which no more than the fewest rounds are measured."""


def time_models(runs: Sequence[Path], size: int, context: RunContext) -> list[dict[str, Any]]:
    """Time what the tasks' `predict` does with the best weights of runs: seconds in each round, and the batch's size.

    Raises:
        UserError: if a run has no such model, or its task cannot predict.
    """
    models = [_Model(run, size, context) for run in runs]
    found: list[dict[str, Any]] = [{"size": len(model.batch), "one": [], "batch": []} for model in models]
    began = time.monotonic()
    for number in range(_WARM_UP + _ROUNDS):
        for model, timed in zip(models, found, strict=True):
            one, batch = model.seconds(model.one), model.seconds(model.batch)
            if number >= _WARM_UP:
                timed["one"].append(one)
                timed["batch"].append(batch)
        late = time.monotonic() - began > _SECONDS
        if late and number + 1 >= _WARM_UP + _FEWEST_ROUNDS:
            break
    return found


class _Model:
    """A trained model with what it is measured on."""

    def __init__(self, run: Path, size: int, context: RunContext) -> None:
        self._opened = open_trained(run, "best", context, batch=size)
        dataset = self._opened.task.valid_data()
        if dataset is None:
            dataset = self._opened.task.train_data()
        setup = self._opened.setup
        lanes = setup.batch.lane_count
        self.one = _first(replace(setup, planned=BatchPlan(lanes, lanes)), dataset, self._opened)
        self.batch = _first(setup, dataset, self._opened)

    def seconds(self, batch: LaneBatch) -> float:
        """Return what one call takes."""
        setup, trained = self._opened.setup, self._opened.trained
        device = setup.context.device
        synchronize(device)
        began = time.perf_counter()
        with torch.no_grad(), setup.precision.forward():
            trained.task.predict(trained.model, batch)
        synchronize(device)
        return time.perf_counter() - began


def _first(setup: RunSetup, dataset: Any, opened: Opened) -> LaneBatch:
    source = SequentialSource(setup, dataset, "data to measure a model on", opened.task.collate)
    for batches in source.rounds(lambda number: None):
        for batch in batches:
            return batch
    raise AssertionError("a source has a sample")
