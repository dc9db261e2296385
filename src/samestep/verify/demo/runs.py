"""The runs of the demo, one after the other, in processes forked from this one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch._dynamo  # noqa: F401  (which the first optimizer of each rank would import)
import torchmetrics  # noqa: F401  (which the task imports on each rank)

from samestep.config import load_config
from samestep.errors import CheckpointError, RankFailed
from samestep.launch.run.notebook import call_on_forks
from samestep.parsing.json_text import parse_json
from samestep.train.record import RunRecord
from samestep.train.task import load_task
from samestep.verify.demo.ranks import train_with_ddp, train_with_samestep
from samestep.words import counted

WORLDS = (1, 2, 4)
SAMESTEP, DDP = "samestep", "plain DDP"
_ON_CPUS = ("distributed.device=cpu", "distributed.backend=gloo")
"""More ranks than GPUs would be an error, and a GPU no faster with so small a model."""
Phase = tuple[int, int | None]
"""A number of ranks, and the step at which one of them is killed."""


@dataclass
class DemoRun:
    """One training of the demo, as far as it is."""

    by: str
    """`samestep`, or `plain DDP`."""
    name: str
    total: int
    phases: tuple[Phase, ...]
    step: int = 0
    losses: list[float] = field(default_factory=list)
    """All of them once it is over; until then those that were shown."""
    state: str = ""
    """The hash of its final state; of plain DDP's weights only."""
    resumed_at: int = 0
    """The first step of its last phase."""
    seconds: float = 0.0

    @property
    def is_over(self) -> bool:
        return bool(self.state)

    @property
    def loss(self) -> float | None:
        """Return the mean loss of the last third, an epoch of the starter project; until it is over, the last loss."""
        if not self.losses:
            return None
        return fmean(self.losses[-self.total // 3 :]) if self.is_over else self.losses[-1]

    def is_same(self, other: DemoRun) -> bool:
        """Return whether both have the same losses and final state, bit for bit."""
        return (self.state, self.losses) == (other.state, other.losses)


@dataclass(frozen=True)
class Demo:
    """The demo's trainings."""

    config: Path
    runs: tuple[DemoRun, ...]

    def of(self, by: str) -> list[DemoRun]:
        return [run for run in self.runs if run.by == by]

    @property
    def is_same(self) -> bool:
        """Return whether all of samestep's runs have the same losses and final state, bit for bit."""
        first, *others = self.of(SAMESTEP)
        return all(run.is_same(first) for run in others)

    def different(self, by: str) -> int:
        """Return how many different final states there are."""
        return len({run.state for run in self.of(by)})


def plan_demo(config: Path) -> Demo:
    """Return the demo of a project, before any of its runs."""
    loaded = load_config(config)
    assert loaded.global_batch is not None
    data: Any = load_task(loaded).train_data()
    total = (loaded.epochs or 1) * -(-len(data) // loaded.global_batch)
    kill = total // 2
    runs = [DemoRun(SAMESTEP, counted(world, "rank"), total, ((world, None),)) for world in WORLDS]
    runs.append(DemoRun(SAMESTEP, f"4 ranks, one killed at step {kill}, then 2", total, ((4, kill), (2, None))))
    runs += [DemoRun(DDP, counted(world, "rank"), total, ((world, None),)) for world in WORLDS]
    return Demo(config, tuple(runs))


def run_demo(demo: Demo, show: Callable[[], None]) -> None:
    """Run all trainings."""
    folder = demo.config.parent / "runs"
    for number, run in enumerate(demo.runs):
        follow, began = _Following(run, show), time.monotonic()
        if run.by == DDP:
            (world, _) = run.phases[0]
            arguments = (demo.config, _ON_CPUS)
            run.losses, run.state = call_on_forks(train_with_ddp, world, arguments, follow, folder / f"{number}.out")
        else:
            _run_phases(demo.config, run, folder / f"{number}", follow)
        run.step, run.seconds = run.total, time.monotonic() - began
        show()


def _run_phases(config: Path, run: DemoRun, folder: Path, follow: Callable[[str], None]) -> None:
    # As many lanes as ranks at most: BatchNorm normalises over a lane, and then over as much as on a rank of plain DDP.
    overrides = [f"run_dir={json.dumps(str(folder))}", "log_every=1", f"lanes={max(WORLDS)}", *_ON_CPUS]
    killed = 0
    for phase, (world, killed_at) in enumerate(run.phases):
        arguments = (config, overrides, folder / "record", killed_at)
        try:
            call_on_forks(train_with_samestep, world, arguments, follow, folder.with_name(f"{folder.name}-{phase}.out"))
        except RankFailed:
            if killed_at is None:
                raise
            killed = killed_at
    record = RunRecord.read(folder / "record")
    run.losses, run.state, run.resumed_at = record.losses, record.state_hash, record.start
    # Else another error has ended it before, or nothing did, and what it shows would be made up.
    if record.steps != run.total or (len(run.phases) > 1 and not 0 < killed <= run.resumed_at <= killed + 1):
        raise CheckpointError(
            f"the run in {folder} has {record.steps} steps of {run.total}, resumed at {run.resumed_at} after a kill at "
            f"{killed}: see the output of its ranks beside it"
        )


class _Following:
    """Takes the lines that rank 0 prints, and shows how far it is."""

    def __init__(self, run: DemoRun, show: Callable[[], None]) -> None:
        self._run, self._show, self._unread = run, show, ""

    def __call__(self, text: str) -> None:
        for row in self._rows(text):
            self._run.step = row["step"] + 1
            self._run.losses.append(row["loss"])
        self._show()

    def _rows(self, text: str) -> Iterator[dict[str, Any]]:
        *lines, self._unread = (self._unread + text).split("\n")
        for line in lines:
            if line.startswith('{"step":'):
                yield parse_json(line)
