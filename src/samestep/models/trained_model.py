"""A trained model, loaded from a run's directory; or opened by all ranks, for passes over data that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from samestep.checkpoint.choose_weights import model_state
from samestep.checkpoint.format import read_training
from samestep.checkpoint.listing import select_checkpoint
from samestep.checkpoint.manifest import Manifest, verify_checkpoint
from samestep.checkpoint.state import require
from samestep.config import Config
from samestep.data.batch import LaneBatch
from samestep.data.sequential import SequentialSource
from samestep.distributed.context import RunContext
from samestep.errors import CheckpointError, TaskError
from samestep.evaluation.eval_rows import views_of
from samestep.lanes.plan import BatchPlan
from samestep.lanes.random_streams import INIT
from samestep.run.origin import refuse_untrusted_task
from samestep.run.run_dir import config_of
from samestep.run_setup import RunSetup
from samestep.train.task import Task, load_task

T = TypeVar("T")
_PASS = "prediction"
"""The name of a pass's random numbers."""


@dataclass(frozen=True)
class Trained:
    """A model with its weights, and where they come from."""

    config: Config
    task: Task
    model: nn.Module
    extra_modules: Sequence[nn.Module]
    """What the task's `extra_modules` returned, as trained: no average is made of them."""
    manifest: Manifest
    weights: str


def load_trained(
    run: Path,
    which: str = "best",
    weights: str = "raw",
    device: torch.device | str = "cpu",
    overrides: Sequence[str] = (),
    prepare: Callable[[Task], None] = lambda task: None,
    trust: bool = False,
) -> Trained:
    """Load the model and the extra modules of a run, in evaluation mode.

    Args:
        run: the run's directory.
        which: the checkpoint: best, last or the number of a step.
        weights: raw, ema, swa or average.
        device: where to put the model.
        overrides: `section.key=value` texts for the run's config.
        prepare: called with the task before it creates its model.
        trust: whether the task's code may run although it is not known to be this user's.

    Raises:
        NotTrusted: if the run's directory names code that this user has not started the run with.
        CheckpointError: if there is no such checkpoint, or it does not fit the task's model.

    Example:
        >>> trained = load_trained(Path("runs/digits"), weights="ema")
        >>> trained.model(batch)
    """
    config = config_of(run, overrides)
    folder = select_checkpoint(run, which).folder
    manifest = verify_checkpoint(folder)
    refuse_untrusted_task(run, config, overrides, trust)
    task = load_task(config)
    prepare(task)
    model, extra_modules = task.model(), list(task.extra_modules())
    training = read_training(folder)
    require(training, "modules")
    saved = [model_state(run, folder, weights, training), *training["modules"]]
    load_modules(folder, [model, *extra_modules], saved)
    for module in (model, *extra_modules):
        module.to(device).eval()
    return Trained(config, task, model, extra_modules, manifest, weights)


def load_modules(folder: Path, modules: Sequence[nn.Module], states: Sequence[dict[str, Any]]) -> None:
    """Load a checkpoint's states into a task's model and extra modules.

    Raises:
        CheckpointError: if they do not fit.
    """
    if len(states) != len(modules):
        raise CheckpointError(
            f"{folder} does not fit the task: it holds {len(states) - 1} extra modules, and "
            f"extra_modules() returns {len(modules) - 1}"
        )
    for module, state in zip(modules, states, strict=True):
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            what = "model" if module is modules[0] else type(module).__name__
            raise CheckpointError(f"{folder} does not fit the task's {what}: {error}") from error


@dataclass(frozen=True)
class Opened:
    """A trained model, and the setup that deals samples out to the ranks."""

    setup: RunSetup
    trained: Trained

    @property
    def task(self) -> Task:
        return self.trained.task

    def source(self, dataset: Any, what: str) -> SequentialSource:
        """Return a dataset in order, cut into batches for all ranks."""
        return SequentialSource(self.setup, dataset, what, self.task.collate)

    def outputs(self, source: SequentialSource, of_batch: Callable[[LaneBatch], T]) -> Iterator[T]:
        """Yield on rank 0 what a function returns for each batch, in the source's order; every rank reads it to its end."""
        for batches in source.rounds(lambda number: self.setup.rng.enter(_PASS, at=(number,))):
            with torch.no_grad():
                mine = [of_batch(batch) for batch in batches]
            for found in self.setup.context.collectives.collect(mine):
                yield from found

    def embed(self, batch: LaneBatch, view: str | None) -> dict[str, Tensor]:
        """Return the embeddings of a batch by view, all of them unless one is named."""
        with self.setup.precision.forward():
            given = self.task.eval_embed(self.trained.model, batch)
        return views_of(given, None if view is None else [view], len(batch))


def open_trained(
    run: Path,
    which: str,
    context: RunContext,
    weights: str = "raw",
    batch: int | None = None,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> Opened:
    """Load the model of a run on every rank; its data is prepared on one of each node.

    Args:
        batch: samples per batch; by default as in evaluation or training.
    """
    # Chosen once for all ranks: a run that is still training saves and removes checkpoints.
    step = context.broadcast(select_checkpoint(run, which).step if context.is_main else 0)
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
