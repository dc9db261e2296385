"""The one place that wires a config and a context into a training."""

from __future__ import annotations

from pathlib import Path

from samestep.config import Config
from samestep.distributed.context import RunContext
from samestep.run.run import Run
from samestep.train.loop import Outcome, Training
from samestep.train.requests import Observation
from samestep.train.task import load_task


def train_once(
    config: Config,
    context: RunContext,
    record: Path | None = None,
    stop_after: int | None = None,
    trace: Path | None = None,
    trace_from: int = 0,
    prune_dir: Path | None = None,
) -> Outcome:
    """Train a config's task on this process's context.

    Args:
        config: The run's config, which names the task.
        context: This process's place in the run.
        record: A directory for the run's exact record, which `samestep verify` compares.
        stop_after: Save after so many steps and raise `Stopped`.
        trace: A directory for every tensor of the steps, which `samestep verify --explain` compares.
        trace_from: The first step that is traced.
        prune_dir: A directory where it asks a sweep after each evaluation whether to continue.

    Returns:
        How far the training got, and how it ended.

    Example:
        config = samestep.load_config("config.yaml")
        with samestep.create_run_context(config, samestep.detect_hardware()) as context:
            outcome = samestep.train_once(config, context)
    """
    with Run(config, context) as run:
        Observation(record, stop_after, trace, trace_from, prune_dir).attach(run)
        return Training(run, load_task(config)).train()
