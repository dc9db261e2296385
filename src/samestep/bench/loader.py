"""Times a step's data by workers and prefetch, against the rest of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch.utils.data import DataLoader

from samestep.bench.document import Document, machine_facts
from samestep.bench.loader_report import Reading, recommended, settings
from samestep.bench.short_runs import Trials, backend_of, training_facts, trials
from samestep.bench.statistics import spread_of
from samestep.config import Config
from samestep.data.batch import Position, StepData
from samestep.data.factory import open_source
from samestep.data.loaders import parts_of
from samestep.distributed.context import RunContext
from samestep.distributed.health.activity import DATA
from samestep.distributed.timed_calls import synchronize
from samestep.run.run import Run
from samestep.step.step import Step
from samestep.tracking.progress import TurnProgress

KIND = "loader"
_SECONDS_OF_A_TURN = 0.5
_FEWEST, _MOST = 3, 100
"""Steps of a turn."""
_WARM_UP = 3


def measure_loader(
    config: Config, context: RunContext, workers: Sequence[int], prefetch: Sequence[int], rounds: int
) -> Document:
    """Time a step's data in several ways, and the rest of a step, in interleaved rounds; every rank calls this."""
    choices = settings(workers, prefetch)
    here = config.loader.model_copy(update={"workers": 0})
    with trials(config, context) as opened, opened.run(loader=here) as run:
        with opened.steps(run) as steps:
            readers = {choice: _Reader(_read(opened, run, *choice), choice) for choice in choices}
            rest = _Rest(run, steps)
            _take_turns(context, list(readers.values()), rest, rounds)
        rows = _rows(context, readers, rest)
        # Their processes end with what they are read by.
        readers.clear()
    facts = machine_facts(str(context.device), context.hosts) | training_facts(config)
    return Document(KIND, facts, rows)


def _read(opened: Trials, run: Run, workers: int, prefetch: int) -> Iterator[StepData]:
    """Steps whose batches are read in one way."""
    task, setup = opened.task, run.setup
    data = task.train_data()
    order, collate = task.order(data), task.collate
    if isinstance(data, DataLoader):
        parts = parts_of(data, setup)
        setup, data, order, collate = parts.setup, parts.dataset, parts.order, parts.collate  # type: ignore[assignment]
    changes: dict[str, Any] = {"workers": workers}
    if workers:
        changes["prefetch"] = prefetch
    loader = setup.config.loader.model_copy(update=changes)
    setup = replace(setup, config=setup.config.model_copy(update={"loader": loader}))
    return open_source(setup, data, order, collate).steps(Position(), None)


class _Reader:
    """Reads steps' batches in one way, and nothing else."""

    def __init__(self, steps: Iterator[StepData], choice: tuple[int, int]) -> None:
        self._steps, (self.workers, self.prefetch) = steps, choice
        self.seconds: list[float] = []
        self._count = 0

    @property
    def label(self) -> str:
        return f"{self.workers} worker(s), {self.prefetch} ahead"

    def turn(self, agree: Callable[[float], float]) -> None:
        """One more turn."""
        self._drain()
        if not self._count:
            self._count = steps_of_a_turn(agree(self._time(_WARM_UP)))
        self.seconds.append(agree(self._time(self._count)))

    def _drain(self) -> None:
        """Read on until nothing is left that was read ahead: since the last turn that was free."""
        left = self.workers * self.prefetch
        while left > 0:
            left -= max(1, self._next())

    def _next(self) -> int:
        data = next(self._steps)
        for _ in data.units:
            data.read()
        return len(data.units)

    def _time(self, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            self._next()
        return (time.perf_counter() - began) / count


class _Rest:
    """Trains, and takes the time that is not spent on data."""

    def __init__(self, run: Run, steps: Iterator[Step]) -> None:
        self._steps, self._activity, self._device = steps, run.context.activity, run.device
        self._activity.timed_every = 1
        self.seconds: list[float] = []
        self._count = 0

    label = "the rest of a step"

    def turn(self, agree: Callable[[float], float]) -> None:
        """One more turn."""
        if not self._count:
            began = time.perf_counter()
            self._time(_WARM_UP)
            # With its data, which may take much longer than all else.
            whole = (time.perf_counter() - began) / _WARM_UP
            self._count = steps_of_a_turn(agree(whole))
        self.seconds.append(agree(self._time(self._count)))

    def _time(self, count: int) -> float:
        reading, began = self._activity.seconds[DATA], time.perf_counter()
        for _ in range(count):
            next(self._steps)
            # Else it would compute while the next step's data is read, and seem to take less.
            synchronize(self._device)
        read = self._activity.seconds[DATA] - reading
        return (time.perf_counter() - began - read) / count


def steps_of_a_turn(seconds: float) -> int:
    """Return how many steps of so many seconds a turn has."""
    return min(_MOST, max(_FEWEST, round(_SECONDS_OF_A_TURN / max(seconds, 1e-9))))


def _take_turns(context: RunContext, readers: list[_Reader], rest: _Rest, rounds: int) -> None:
    variants: list[_Reader | _Rest] = [rest, *readers]

    def slowest(seconds: float) -> float:
        return max(context.gather(seconds))

    with TurnProgress(rounds * len(variants), context.log, context.is_main) as progress:
        for number in range(rounds):
            first = number % len(variants)
            for one in (*variants[first:], *variants[:first]):
                progress.begin(one.label)
                context.barrier()
                one.turn(slowest)
                progress.end()


def _rows(context: RunContext, readers: dict[tuple[int, int], _Reader], rest: _Rest) -> list[dict[str, Any]]:
    others = spread_of(rest.seconds)
    spreads = {choice: spread_of(reader.seconds) for choice, reader in readers.items()}
    ways = {choice: Reading(*choice, data=spread.median, rest=others.median) for choice, spread in spreads.items()}
    best = recommended(list(ways.values()))
    return [
        {
            "workers": reader.workers,
            "prefetch": reader.prefetch,
            "world": context.world,
            "backend": backend_of(context),
            "seconds": reader.seconds,
            **asdict(spreads[choice]),
            "step_seconds": asdict(others),
            "bottleneck": ways[choice].is_bottleneck,
            "recommended": ways[choice] is best,
        }
        for choice, reader in readers.items()
    ]
