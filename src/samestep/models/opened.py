"""A trained model, opened by all ranks for passes over data that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep.distributed.context import RunContext
from samestep.errors import TaskError
from samestep.lanes.plan import BatchPlan
from samestep.lanes.random_streams import INIT
from samestep.models.trained_model import Trained, load_trained
from samestep.run.run_dir import config_of
from samestep.run_setup import RunSetup
from samestep.train.task import Task


@dataclass(frozen=True)
class Opened:
    """A trained model, and the setup that deals samples out to the ranks."""

    setup: RunSetup
    trained: Trained

    @property
    def task(self) -> Task:
        return self.trained.task


def open_trained(
    run: Path,
    step: int,
    context: RunContext,
    weights: str = "raw",
    batch: int | None = None,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> Opened:
    """Load the model of a run on every rank; its data is prepared on one of each node.

    Args:
        step: the checkpoint's. Chosen once for all ranks: a run that is still training saves and
            removes checkpoints.
        batch: samples per batch; by default as in evaluation or training.
    """
    config = config_of(run, overrides)
    planned = config.batch_plan(context.world)
    size = batch or config.evaluation.batch or planned.lane_batch
    # Lanes only distribute the work here, so there may be as many as it takes.
    lane_count = max(planned.lane_count, context.world)
    setup = RunSetup.create(config, context, BatchPlan(size * lane_count, lane_count))
    setup = replace(setup, assignment=replace(setup.assignment, fused=False))

    def prepare(task: Task) -> None:
        with context.rank0_first() as first:
            if first:
                task.prepare_data()
        setup.rng.enter(INIT)

    trained = load_trained(run, str(step), weights, context.device, overrides, prepare, trust)
    return Opened(setup, trained)


def dataset_of(task: Task, data: str) -> Any:
    """Return the data that a command names: valid, train, or what the task's `predict_data` takes."""
    if data == "train":
        return task.train_data()
    if data != "valid":
        return task.predict_data(data)
    dataset = task.valid_data()
    if dataset is None:
        raise TaskError(f"{type(task).__name__} has no validation data: valid_data() returns None")
    return dataset


def refuse_without_embeddings(task: Task) -> None:
    """Refuse a task that does not say what its embeddings are."""
    if not task.has_embeddings:
        raise TaskError(f"{type(task).__name__} has no embeddings: define eval_embed(self, model, batch)")
