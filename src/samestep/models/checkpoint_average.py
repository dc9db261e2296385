"""Checkpoint averaging: the mean of a run's checkpoints, evaluated and written to one file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from samestep.checkpoint.choose_weights import AVERAGE_FILE
from samestep.checkpoint.files import DigestedFile, Files, replacing
from samestep.checkpoint.format import read_model, read_training, write_safetensors
from samestep.checkpoint.listing import FoundCheckpoint, list_checkpoints, rank_by_metric
from samestep.checkpoint.manifest import verify_checkpoint
from samestep.checkpoint.snapshot import Snapshot
from samestep.checkpoint.state import complete_model_state
from samestep.config import Config
from samestep.data.batch import Moment
from samestep.distributed.context import RunContext
from samestep.errors import CheckpointError
from samestep.evaluation.evaluate import Values
from samestep.evaluation.update_bn import measure_batchnorm
from samestep.lanes.random_streams import INIT
from samestep.models.trained_model import load_modules
from samestep.optim.weight_average import RunningMean
from samestep.run_setup import RunSetup
from samestep.train.task import load_task
from samestep.train.task_evaluation import TaskEvaluation

By = Literal["last", "best"]


@dataclass(frozen=True)
class Averaged:
    """The result of averaging: what was averaged, how good the mean is, and where it is."""

    metric: str
    """The metric they are compared by: best.metric, of the raw weights."""
    checkpoints: dict[int, float | None]
    """By step, the value of each of them in its run; None if it was not evaluated."""
    values: Values
    """The evaluation of the mean; empty without a validation set."""
    path: Path

    @property
    def value(self) -> float | None:
        """The mean's value of that metric; None if it has none."""
        value = self.values.get(self.metric)
        return float(value) if isinstance(value, (int, float)) else None


def average_run(run: Path, config: Config, context: RunContext, count: int, by: By) -> Averaged:
    """Average a run's last or best checkpoints into one file; every rank calls this.

    BatchNorm's statistics are estimated again for the mean, over the training set.

    Args:
        run: the run's directory.
        config: its config.
        context: this process's place in the run.
        count: how many checkpoints to average.
        by: `last` for the newest ones, `best` for those with the best values of best.metric.

    Raises:
        CheckpointError: if there are not so many, one is damaged, or the file cannot be written.
    """
    chosen = context.broadcast(_choose(run, config, count, by) if context.is_main else [])
    setup, task, last = RunSetup.create(config, context), load_task(config), chosen[-1].step - 1
    with context.rank0_first() as first:
        if first:
            task.prepare_data()
    setup.rng.enter(INIT)
    train_data, valid_data = task.train_data(), task.valid_data()
    modules = [task.model().to(context.device).train(), *task.extra_modules()]
    for module in modules[1:]:
        module.to(context.device)
    mean = RunningMean(modules[0])
    for found in chosen:
        training = read_training(found.folder)
        load_modules(
            found.folder, modules, [complete_model_state(read_model(found.folder), training), *training["modules"]]
        )
        mean.update()
    with mean.swapped():
        order = task.order(train_data)
        if measure_batchnorm(setup, modules, task.forward_pass, train_data, order, task.collate):
            mean.take_statistics()
        values: Values = {}
        if valid_data is not None:
            values = TaskEvaluation(setup, task, train_data, valid_data, last).measure(modules, Moment(last))
    metric = config.best.metric.removeprefix("ema_").removeprefix("swa_")
    measured = {c.step: c.manifest.value_of(metric) for c in chosen if c.manifest is not None}
    averaged = Averaged(metric, measured, values, run / AVERAGE_FILE)
    if context.is_main:
        _write(averaged, mean.state_dict()["model"])
    context.barrier()
    return averaged


def _choose(run: Path, config: Config, count: int, by: By) -> list[FoundCheckpoint]:
    """Return the checkpoints to average, by step; every byte of them is verified."""
    listed = list_checkpoints(run / "checkpoints", checksums=False)
    usable = [found for found in listed if not found.wrong]
    rule = config.best
    if by == "best":
        found, which = (rank_by_metric(usable, rule.model_dump())[:count], f"whose {rule.metric} is known")
        key = "checkpoint.keep_best"
    else:
        found, which, key = usable[-count:], "that can be used", "checkpoint.keep_last"
    if len(found) < count:
        steps = ", ".join(str(item.step) for item in found) or "none"
        raise CheckpointError(
            f"--{by} is {count}, but {run} has {len(found)} checkpoint(s) {which} (steps: {steps}). "
            f"Request fewer, or let the run keep more: {key}={count}"
        )
    for item in found:
        try:
            verify_checkpoint(item.folder)
        except CheckpointError as error:
            raise CheckpointError(f"{item.folder}: {error}") from None
    return sorted(found, key=lambda item: item.step)


def _write(averaged: Averaged, model: dict[str, Tensor]) -> None:
    """Write the mean under a temporary name, and rename it once it is on the disk."""
    metadata = {"steps": json.dumps(list(averaged.checkpoints)), "metrics": json.dumps(averaged.values)}
    files, tensors = Files(), Snapshot().take(model)
    try:
        with replacing(averaged.path) as partial, DigestedFile(files, partial) as file:
            write_safetensors(file, tensors, metadata)
        files.sync(averaged.path.parent)
    except OSError as error:
        raise CheckpointError(f"{averaged.path} could not be written: {error.strerror or error}") from error
