"""Times the steps of a task at several numbers of lanes, in turns on the same ranks.

Every turn is a run of its own in a temporary directory, warmed up before the clock starts; only one
holds memory at a time. The choices take turns in rotating order, and one turn of each is a round.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from samestep.config import Config
from samestep.config.evaluation import EvaluationConfig
from samestep.config.trial_runs import trial_run
from samestep.distributed.context import RunContext
from samestep.distributed.hardware import detect_hardware
from samestep.distributed.signals import stopping_at_once
from samestep.errors import OutOfMemory, PlanError
from samestep.lane_tuning.choices import Choice, Comparison
from samestep.lane_tuning.result import Measured
from samestep.step.step import Step
from samestep.step.supported import lonely_samples
from samestep.train.loop import Training
from samestep.train.progress import TurnProgress
from samestep.train.run import Run
from samestep.train.task import load_task
from samestep.train.trial import quiet_context, reading_once, refuse_small_data

_WARM_UP = {"cuda": 24}
"""Steps before the clock starts. On a GPU steps run eagerly at first, then are captured as graphs."""
_WARM_UP_ELSEWHERE = 3
_SECONDS = 1.0
"""What the timed steps of a turn take together, about."""
_FEWEST, _MOST = 5, 100
"""Timed steps of a turn."""
_ENDLESS = 1_000_000


def measure_lanes(config: Config, context: RunContext, compared: Comparison) -> list[Measured]:
    """Time a task's steps for each choice; every rank calls this and gets the same result.

    Args:
        config: The training's config.
        context: This process's place in the run.
        compared: What is compared.

    Raises:
        PlanError: if this device or data cannot measure it.
    """
    _refuse_widths(config, context, compared)
    choices = compared.choices(context.world)
    with (
        stopping_at_once("the measurement", context.log.main) as check_stop,
        TemporaryDirectory(prefix="samestep-lanes-", ignore_cleanup_errors=True) as folder,
        TurnProgress(compared.rounds * len(choices), context.log, context.is_main) as progress,
    ):
        turns = _Turns(config, context, Path(folder), compared.steps, check_stop)
        for number in range(compared.rounds):
            first = number % len(choices)
            for choice in (*choices[first:], *choices[:first]):
                progress.begin(choice.label)
                turns.take(choice)
                progress.end()
    return [turns.measured(choice) for choice in choices]


def _refuse_widths(config: Config, context: RunContext, compared: Comparison) -> None:
    if not compared.parallel:
        return
    if context.device.type != "cuda":
        raise PlanError(
            f"--parallel is about lanes side by side in CUDA graphs, but this rank runs on "
            f"{context.device}, where a rank's lanes run one after the other: leave it out"
        )
    if config.speed.graph is False:
        raise PlanError(
            "--parallel is about lanes side by side in CUDA graphs, but speed.graph is false: set "
            "speed.graph=auto, or leave out --parallel"
        )


def turn_config(config: Config, choice: Choice, folder: Path) -> Config:
    """The config of one turn: in its own directory, without saves, evaluations or an end.

    Args:
        config: The training's config.
        choice: What is timed.
        folder: Where it may write.
    """
    speed = config.speed
    if choice.parallel is not None:
        speed = speed.model_copy(update={"parallel_lanes": choice.parallel})
    return trial_run(
        config,
        run_dir=str(folder),
        lanes=choice.lanes,
        speed=speed,
        steps=_ENDLESS,
        # Never due; a plateau's schedule requires that there are evaluations.
        evaluation=EvaluationConfig(every_epochs=None, every_steps=_ENDLESS),
    )


class _Turn(NamedTuple):
    seconds: float
    """Of a step."""
    peak_bytes: int | None


class _Turns:
    """Takes turns on this rank, and keeps what they took."""

    def __init__(
        self,
        config: Config,
        context: RunContext,
        folder: Path,
        steps: int | None,
        check_stop: Callable[[], None],
    ) -> None:
        self._config, self._context, self._folder, self._steps = config, context, folder, steps
        self._check_stop = check_stop
        self._hardware = detect_hardware()
        self._task = reading_once(load_task(config))
        self._taken: dict[Choice, list[_Turn]] = {}
        self._failed: dict[Choice, str] = {}
        self._notes: dict[Choice, dict[str, None]] = {}
        self._runs = 0

    def take(self, choice: Choice) -> None:
        """Time some steps of a choice, unless it could not be run before."""
        if choice in self._failed:
            return
        try:
            turn = self._run(choice)
        except OutOfMemory as error:
            if self._context.world > 1:
                raise  # others may have had enough memory, and be waiting for this rank
            self._failed[choice] = str(error).splitlines()[0]
            turn = None
        gc.collect()
        if turn is not None:
            ranks = self._context.gather(turn)
            peaks = [rank.peak_bytes for rank in ranks if rank.peak_bytes is not None]
            slowest = _Turn(max(rank.seconds for rank in ranks), max(peaks, default=None))
            self._taken.setdefault(choice, []).append(slowest)

    def measured(self, choice: Choice) -> Measured:
        """Everything about a choice."""
        world = self._context.world
        plan = self._config.model_copy(update={"lanes": choice.lanes}).batch_plan(world)
        device = _described(self._context)
        found = Measured(world, plan.lane_count, plan.lane_batch, device, choice.parallel)
        if choice in self._failed:
            return replace(found, failed=self._failed[choice])
        turns = self._taken[choice]
        peaks = [turn.peak_bytes for turn in turns if turn.peak_bytes is not None]
        return replace(
            found,
            seconds=tuple(turn.seconds for turn in turns),
            peak_bytes=max(peaks, default=None),
            notes=tuple(self._notes.get(choice, {})),
        )

    def _run(self, choice: Choice) -> _Turn | None:
        self._runs += 1
        config = turn_config(self._config, choice, self._folder / str(self._runs))
        device = self._context.device
        _reset_memory(device)
        with (
            quiet_context(config, self._hardware) as (context, log),
            Run(config, context) as run,
        ):
            training = Training(run, self._task)
            if self._runs == 1:
                refuse_small_data(run, self._task)
            lonely = lonely_samples([run.model], run.batch.lane_batch, 0)
            if lonely:
                self._failed[choice] = lonely
                return None
            with closing(training.steps()) as steps:
                seconds = self._time(self._stoppable(steps))
            peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
        notes = self._notes.setdefault(choice, {})
        notes |= dict.fromkeys(line for line in log.lines if line.startswith("speed."))
        if config.speed.compile:
            torch.compiler.reset()  # or the shapes of all turns would count against one limit
        return _Turn(seconds, peak)

    def _time(self, steps: Iterator[Step]) -> float:
        """Seconds of a step, after a warm-up."""
        device = self._context.device
        warm_up = _WARM_UP.get(device.type, _WARM_UP_ELSEWHERE)
        _advance(steps, warm_up - 2)
        estimate = _seconds_of(steps, 2, device)
        if self._steps is None:
            fitting = round(_SECONDS / estimate)
            self._steps = self._context.broadcast(min(max(fitting, _FEWEST), _MOST))
        return _seconds_of(steps, self._steps, device)

    def _stoppable(self, steps: Iterator[Step]) -> Iterator[Step]:
        for step in steps:
            self._check_stop()
            yield step


def _described(context: RunContext) -> str:
    if context.device.type == "cuda":
        return torch.cuda.get_device_name(context.device)
    return f"{context.device}, {context.threads} thread(s)"


def _advance(steps: Iterator[Step], count: int) -> None:
    for done in range(count):
        if next(steps, None) is None:
            raise PlanError(
                f"the training data ended after {done} of {count} steps to time: use data that can be "
                "read again, or fewer --steps"
            )


def _seconds_of(steps: Iterator[Step], count: int, device: torch.device) -> float:
    _wait_for(device)
    began = time.perf_counter()
    _advance(steps, count)
    _wait_for(device)
    return (time.perf_counter() - began) / count


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_memory(device: torch.device) -> None:
    if device.type == "cuda":
        # Reserved, not allocated: the memory of graphs is reserved for as long as they live.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
