"""Times the steps of a task in several ways, in turns on the same ranks.

Every turn is a run of its own in a temporary directory, warmed up before the clock starts; only one
holds memory at a time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from samestep.config import Config
from samestep.config.evaluation import EvaluationConfig
from samestep.config.trial_runs import trial_run
from samestep.distributed.context import RunContext
from samestep.distributed.hardware import detect_hardware
from samestep.distributed.signals import stopping_at_once
from samestep.errors import OutOfMemory, PlanError, UserError
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


class Labelled(Hashable, Protocol):
    """What is timed: one of several choices."""

    @property
    def label(self) -> str:
        """As a person says it."""


ChoiceT = TypeVar("ChoiceT", bound=Labelled)


def take_turns(
    config: Config,
    context: RunContext,
    choices: Sequence[ChoiceT],
    changed: Callable[[ChoiceT], Config],
    rounds: int,
    steps: int | None,
    refused: tuple[type[UserError], ...] = (),
    after: Callable[[ChoiceT], None] = lambda _: None,
) -> Turns[ChoiceT]:
    """Time a task's steps for each choice, in rotating order; one turn of each is a round.

    Args:
        config: Whose task is timed.
        context: This process's place in the run.
        choices: What is compared.
        changed: The config of a choice.
        rounds: Turns of each.
        steps: Timed steps of a turn; by default about a second's.
        refused: What all ranks raise alike for a choice that cannot be run, which is then left out.
        after: Called after each turn.
    """
    with (
        stopping_at_once("the measurement", context.log.main) as check_stop,
        TemporaryDirectory(prefix="samestep-lanes-", ignore_cleanup_errors=True) as folder,
        TurnProgress(rounds * len(choices), context.log, context.is_main) as progress,
    ):
        turns = Turns(config, context, Path(folder), steps, check_stop, changed, refused)
        for number in range(rounds):
            first = number % len(choices)
            for choice in (*choices[first:], *choices[:first]):
                progress.begin(choice.label)
                turns.take(choice)
                after(choice)
                progress.end()
    return turns


def endless(config: Config, folder: Path) -> Config:
    """The config of one turn: in its own directory, without saves, evaluations or an end.

    Args:
        config: What is timed.
        folder: Where it may write.
    """
    return trial_run(
        config,
        run_dir=str(folder),
        steps=_ENDLESS,
        # Never due; a plateau's schedule requires that there are evaluations.
        evaluation=EvaluationConfig(every_epochs=None, every_steps=_ENDLESS),
    )


class Turn(NamedTuple):
    seconds: float
    """Of a step."""
    peak_bytes: int | None


class Turns(Generic[ChoiceT]):
    """Takes turns on this rank, and keeps what they took."""

    def __init__(
        self,
        config: Config,
        context: RunContext,
        folder: Path,
        steps: int | None,
        check_stop: Callable[[], None],
        changed: Callable[[ChoiceT], Config],
        refused: tuple[type[UserError], ...],
    ) -> None:
        self._context, self._folder, self._steps = context, folder, steps
        self._refused = refused
        self._check_stop, self._changed = check_stop, changed
        self._hardware = detect_hardware()
        self._task = reading_once(load_task(config))
        self.taken: dict[ChoiceT, list[Turn]] = {}
        """What each turn of a choice took, on the slowest rank."""
        self.failed: dict[ChoiceT, str] = {}
        """Why a choice could not be run."""
        self._notes: dict[ChoiceT, dict[str, None]] = {}
        self._runs = 0

    def take(self, choice: ChoiceT) -> None:
        """Time some steps of a choice, unless it could not be run before."""
        if choice in self.failed:
            return
        try:
            turn = self._run(choice)
        except OutOfMemory as error:
            if self._context.world > 1:
                raise  # others may have had enough memory, and be waiting for this rank
            self.failed[choice] = str(error).splitlines()[0]
            turn = None
        except self._refused as error:
            self.failed[choice] = str(error).splitlines()[0]
            turn = None
        gc.collect()
        if turn is not None:
            ranks = self._context.gather(turn)
            peaks = [rank.peak_bytes for rank in ranks if rank.peak_bytes is not None]
            slowest = Turn(max(rank.seconds for rank in ranks), max(peaks, default=None))
            self.taken.setdefault(choice, []).append(slowest)

    def notes(self, choice: ChoiceT) -> tuple[str, ...]:
        """What its runs logged about their speed."""
        return tuple(self._notes.get(choice, {}))

    def _run(self, choice: ChoiceT) -> Turn | None:
        self._runs += 1
        config = endless(self._changed(choice), self._folder / str(self._runs))
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
                self.failed[choice] = lonely
                return None
            with closing(training.steps()) as steps:
                seconds = self._time(self._stoppable(steps))
            peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
        notes = self._notes.setdefault(choice, {})
        notes |= dict.fromkeys(line for line in log.lines if line.startswith("speed."))
        if config.speed.compile:
            torch.compiler.reset()  # or the shapes of all turns would count against one limit
        return Turn(seconds, peak)

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
