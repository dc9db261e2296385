"""How long a save blocks the training, compared with a plain synchronous `torch.save`.

    python benchmarks/checkpoint.py [--megabytes 500] [--rounds 7] [--device cpu|cuda] [--directory DIR] [--json FILE]

The ways to save are interleaved on the same state and the same disk. Measured are the pause of the training, when the
save is on disk, a step while it is written, and a restore.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from samestep.bench.document import Document, machine_facts
from samestep.bench.short_runs import training_facts, trials
from samestep.bench.statistics import spread_of
from samestep.checkpoint.listing import newest_valid
from samestep.checkpoint.resume import ResumePoint
from samestep.cli.app import print_rows
from samestep.config import Config, load_config
from samestep.config.schema import CheckpointConfig
from samestep.data.batch import LaneBatch, Position
from samestep.distributed.context import RunContext, create_run_context
from samestep.distributed.hardware import detect_hardware
from samestep.distributed.timed_calls import synchronize
from samestep.errors import CheckpointError
from samestep.report.format import format_bytes, format_seconds
from samestep.run.run import Run
from samestep.run.saver import Saver
from samestep.step.step import Step
from samestep.tracking.progress import CountedProgress
from samestep.train.task import Task


class Perceptron(Task):
    """A perceptron whose weights and AdamW's moments are what is saved."""

    def __init__(self, width: int) -> None:
        self._width = width

    def model(self) -> nn.Module:
        width = self._width
        return nn.Sequential(
            nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU(),
            nn.Linear(width, 10),
        )  # fmt: skip

    def train_data(self) -> TensorDataset:
        drawn = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(1024, self._width, generator=drawn), torch.arange(1024) % 10)

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch)


GOALS = {"cpu": 0.2, "cuda": 0.1}
CONTROL = "torch.save"
_WAYS = ("behind", "waiting")
"""Behind the training, or it waits for the disk."""
_SECONDS_OF_STEPS = 0.3
_MOST_STEPS = 50


def measure_checkpoint(config: Config, context: RunContext, folder: Path, rounds: int) -> Document:
    """Time saving and restoring a task's training in interleaved rounds, in a folder that exists."""
    # A captured step writes to the tensors that it was captured with, and a restore brings others.
    eager = config.speed.model_copy(update={"graph": False})
    with trials(config, context) as opened, opened.run(speed=eager) as run, opened.steps(run) as steps:
        next(steps)  # optimizers keep nothing before it
        contest = SaveContest(run, steps, folder)
        turns = contest.turns()
        with CountedProgress("turn", rounds * len(turns), context.log, True) as progress:
            for number in range(rounds + 1):
                for name, turn in turns.items():
                    progress.begin(name)
                    contest.take(turn, counts=number > 0)  # the first allocates and warms up
                    if number:
                        progress.add()
        rows = contest.rows()
    facts = machine_facts(str(context.device), context.hosts) | training_facts(config)
    return Document("checkpoint", facts, rows)


Taken = dict[str, float]
"""Seconds by what was done."""


class SaveContest:
    """One training that is saved in several ways, and restored."""

    def __init__(self, run: Run, steps: Iterator[Step], folder: Path) -> None:
        self._context, self._steps, self._folder = run.context, steps, folder
        self._device, self._state = run.device, run.state
        self._config = run.config
        for how in _WAYS:
            (folder / how).mkdir()
        self._savers = {how: self._saver(folder / how, how == "behind") for how in _WAYS}
        self._saves, self._count = 0, 0
        self._seconds: dict[str, list[float]] = {}
        self._bytes: dict[str, int] = {}

    def _saver(self, folder: Path, asynchronous: bool, point: ResumePoint | None = None) -> Saver:
        rules = CheckpointConfig(asynchronous=asynchronous, keep_last=1)
        config = self._config.model_copy(update={"checkpoint": rules})
        saver = Saver(config, self._context, folder, point)
        state = self._state
        saver.prepare(state.modules, state.optimizers, state.schedules)
        return saver

    def turns(self) -> dict[str, Callable[[], Taken]]:
        """Return what is done in a round, by name."""
        return {
            CONTROL: self._torch_save,
            "save": self._save_behind,
            "save and wait": self._save_and_wait,
            "steps": self._steps_beside,
            "restore": self._restore,
        }

    def take(self, turn: Callable[[], Taken], counts: bool) -> None:
        """Take one more turn, when the device has finished the one before."""
        synchronize(self._device)
        taken = turn()
        for key, seconds in taken.items() if counts else ():
            self._seconds.setdefault(key, []).append(seconds)

    def _torch_save(self) -> Taken:
        """No checksums and no fsync: the least that a person would write."""
        began, state = time.perf_counter(), self._state
        path = self._folder / "plain.pt"
        modules = [module.state_dict() for module in state.modules]
        optimizers = [optimizer.state_dict() for optimizer in state.optimizers]
        torch.save({"modules": modules, "optimizers": optimizers}, path)
        self._bytes[CONTROL] = path.stat().st_size
        return {CONTROL: time.perf_counter() - began}

    def _save_behind(self) -> Taken:
        began = time.perf_counter()
        self._save("behind")
        paused = time.perf_counter() - began
        self._savers["behind"].wait()
        return {"pause": paused, "save": time.perf_counter() - began}

    def _save_and_wait(self) -> Taken:
        began = time.perf_counter()
        self._save("waiting")
        return {"pause, asynchronous: false": time.perf_counter() - began}

    def _save(self, how: str) -> None:
        self._saves += 1
        self._savers[how].save(Position(step=self._saves), {}, None)

    def _steps_beside(self) -> Taken:
        """Return a step with nothing else to do, and while a save is written."""
        if not self._count:
            self._count = min(_MOST_STEPS, max(3, round(_SECONDS_OF_STEPS / self._time_steps(3))))
        alone = self._time_steps(self._count)
        self._save("behind")
        beside = self._time_steps(self._count)
        self._savers["behind"].wait()
        return {"step": alone, "step beside a save": beside}

    def _time_steps(self, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            next(self._steps)
        synchronize(self._device)
        return (time.perf_counter() - began) / count

    def _restore(self) -> Taken:
        """As a resumed run does: find the newest, check it, read it, and load it."""
        began = time.perf_counter()
        folder = self._folder / "behind"
        found = newest_valid(folder / "checkpoints", lambda line: None)
        if found is None or found.manifest is None:
            raise CheckpointError(f"{folder} has no checkpoint that can be restored")
        self._saver(folder, True, ResumePoint(found.folder, found.manifest))
        synchronize(self._device)
        self._bytes["restore"] = _bytes_in(found.folder)
        return {"restore": time.perf_counter() - began}

    def rows(self) -> list[dict[str, Any]]:
        """Return what each took."""
        written = self._bytes["restore"]
        return [
            {
                "action": action,
                "bytes": self._bytes.get(action, 0 if action.startswith("step") else written),
                "seconds": seconds,
                **asdict(spread_of(seconds)),
            }
            for action, seconds in self._seconds.items()
        ]


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    width = max(1, round(math.sqrt(arguments.megabytes * 1e6 / (3 * 4 * 8))))  # of float32 weights and AdamW's moments
    document = {
        "name": "perceptron", "task": f"{__file__}:Perceptron", "params": {"width": width}, "global_batch": 128,
        "lanes": 1, "steps": 1, "optimizer": {"name": "adamw", "lr": 0.001},
        "distributed": {"device": arguments.device},
    }  # fmt: skip
    config = load_config(document)
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory) as folder,
        create_run_context(config, detect_hardware()) as context,
    ):
        found = measure_checkpoint(config, context, Path(folder), arguments.rounds)
    rows = [
        (row["action"], format_seconds(row["median"]), format_seconds(row["low"]), format_seconds(row["high"]),
         format_bytes(row["bytes"]))
        for row in found.rows
    ]  # fmt: skip
    print_rows(("action", "median", "low", "high", "bytes"), rows)
    print(f"goal: a pause of at most {GOALS[arguments.device]} times torch.save")
    if arguments.json:
        found.write(arguments.json)


if __name__ == "__main__":
    main()
