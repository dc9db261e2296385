"""Runs that only measure: opened quietly, by ranks that have met already, on data that is read once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from samestep.config import Config
from samestep.distributed.context import RunContext, create_run_context
from samestep.distributed.logging import LOGGER, KeptLog
from samestep.environment.hardware import Hardware
from samestep.errors import PlanError
from samestep.run.run import Run
from samestep.train.task import Task


@contextmanager
def quiet_context(config: Config, hardware: Hardware) -> Iterator[tuple[RunContext, KeptLog]]:
    """A context for one run, on the process group that is open, and the log that it keeps."""
    level = LOGGER.level
    LOGGER.setLevel(logging.WARNING)
    try:
        opened = create_run_context(config, hardware)
    finally:
        LOGGER.setLevel(level)
    with opened as context:
        log = context.log = KeptLog(context.rank, context.world)
        yield context, log


def reading_once(task: Task) -> Task:
    """Return the task, whose data is read once for all runs: only models must be new."""
    for name in ("prepare_data", "train_data", "valid_data"):
        setattr(task, name, functools.cache(getattr(task, name)))
    return task


def refuse_small_data(run: Run, task: Task) -> None:
    """Refuse data in which every step is a tail, with lanes that are empty or cut off."""
    data = task.train_data()
    samples, batch = run.source(data, task.order(data), task.collate).samples, run.batch
    if samples is not None and samples < batch.global_batch:
        raise PlanError(
            f"the training data has {samples} samples, and a step takes global_batch "
            f"{batch.global_batch}: no step has whole lanes, so what it takes says nothing. Use more data, "
            "or a smaller global_batch"
        )
