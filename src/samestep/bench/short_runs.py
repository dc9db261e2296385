"""Short runs of a task on the ranks that are there, each in a directory of its own that is removed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samestep.bench.scaling_plan import is_builtin
from samestep.config import Config
from samestep.config.measuring_run import endless_run
from samestep.distributed.collectives import TorchCollectives
from samestep.distributed.context import RunContext
from samestep.distributed.hardware import detect_hardware
from samestep.distributed.logging import KeptLog
from samestep.distributed.signals import stopping_at_once
from samestep.errors import PlanError
from samestep.report.run_facts import config_fact
from samestep.run.run import Run
from samestep.step.step import Step
from samestep.train.loop import Training
from samestep.train.quiet_run import quiet_context, reading_once, refuse_small_data
from samestep.train.task import Task, load_task


class Trials:
    """Opens runs of one task, one after the other."""

    def __init__(self, config: Config, context: RunContext, folder: Path, check_stop: Callable[[], None]) -> None:
        self.config, self.context = config, context
        self.task: Task = reading_once(load_task(config))
        self._folder, self._check_stop = folder, check_stop
        self._hardware = detect_hardware()
        self._runs = 0
        self._read_data()

    def _read_data(self) -> None:
        """Before anything is measured: data is not what a run takes."""
        with self.context.rank0_first() as first:
            if first:
                self.task.prepare_data()
        self.task.train_data()
        self.task.valid_data()

    @contextmanager
    def run(self, lanes_per_rank: int | None = None, **changes: Any) -> Iterator[Run]:
        """A run on these ranks, whatever number of them the config is for.

        Args:
            lanes_per_rank: Other than the config's; without it, what it has, or one if that is too few.
        """
        world = self.context.world
        if self.config.batch_per_rank is None:
            own = max(self.config.lane_count(world), world)
            changes["lanes"] = own if lanes_per_rank is None else lanes_per_rank * world
        weights = self.config.distributed.lane_weights
        if weights is not None and len(weights) != world:
            even = self.config.distributed.model_copy(update={"lane_weights": None})
            changes["distributed"] = even
        with self.run_of(self.config, **changes) as (run, _):
            yield run

    @contextmanager
    def run_of(self, config: Config, **changes: Any) -> Iterator[tuple[Run, KeptLog]]:
        """A run of another config of this task, which saves and evaluates nothing, and what it logs."""
        self._runs += 1
        endless = endless_run(config, str(self._folder / str(self._runs)), **changes)
        with quiet_context(endless, self._hardware) as (context, log), Run(endless, context) as run:
            yield run, log
        gc.collect()

    @contextmanager
    def steps(self, run: Run) -> Iterator[Iterator[Step]]:
        """The steps of the task's training; stops where a signal asks for it."""
        training = Training(run, self.task)
        refuse_small_data(run, self.task)
        with closing(training.steps()) as steps:
            yield self._stoppable(steps)

    def _stoppable(self, steps: Iterator[Step]) -> Iterator[Step]:
        for step in steps:
            self._check_stop()
            yield step
        raise PlanError(
            "the training data ended before everything was measured: use data that can be read again, or measure fewer steps"
        )


@contextmanager
def trials(config: Config, context: RunContext) -> Iterator[Trials]:
    """Runs of a config's task that leave nothing behind."""
    with (
        stopping_at_once("the measurement", context.log.main) as check_stop,
        TemporaryDirectory(prefix="samestep-bench-", ignore_cleanup_errors=True) as folder,
    ):
        yield Trials(config, context, Path(folder), check_stop)


def training_facts(config: Config) -> dict[str, str]:
    """Return what was trained, for a document's machine."""
    if is_builtin(config):
        return {"config": "built-in", "task": "{workload}-{size}".format(**config.params)}
    return {**config_fact(config), "task": (config.task or "").rpartition(":")[2]}


def backend_of(context: RunContext) -> str:
    """Return how its ranks talk; "none" where there is one."""
    collectives = context.collectives
    return collectives.backend if isinstance(collectives, TorchCollectives) else "none"
