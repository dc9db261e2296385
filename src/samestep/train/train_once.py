"""The one place that wires a config and a context into a training."""

from __future__ import annotations

from pathlib import Path

from samestep.config import Config
from samestep.distributed.context import RunContext
from samestep.train.loop import Outcome, Training
from samestep.train.record import Recorder
from samestep.train.run import Run
from samestep.train.task import load_task


def train_once(
    config: Config,
    context: RunContext,
    record: Path | None = None,
    stop_after: int | None = None,
) -> Outcome:
    """Train a config's task on this process's context; `record` keeps the exact record there.

    With `stop_after` it is saved after so many steps and raises `Stopped`.
    """
    with Run(config, context) as run:
        if stop_after is not None:
            run.pause_after(stop_after)
        recorder = Recorder(run) if record is not None else None
        training = Training(run, load_task(config))
        outcome = training.train()
        if recorder is not None and record is not None:
            averages = training.averages.weights()
            recorder.write(record, run.model, training.optimizers, outcome.metrics, averages)
        return outcome
