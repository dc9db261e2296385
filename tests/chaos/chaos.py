"""Kills a run again and again, at random instants and sizes, and lets it go on each time.

    python -m tests.chaos.chaos --kills 100 --seed 1

Every run must end with the untouched run's weights and losses, no process may be left, and
nothing half-written may ever be taken for a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from samestep.checkpoint.listing import list_checkpoints
from samestep.config import load_config
from samestep.train.record import RunRecord
from tests.cli.processes import command, popen, processes_of
from tests.distributed.running import settings
from tests.ranks import RankProcesses

STEPS = 30
SECONDS_TO_END = 120.0
"""After a kill, every process of the run must have ended by then."""


def train_in_chaos(config: dict[str, Any], record: str, dies_at_call: int | None) -> None:
    """A rank of a run; rank 0 may kill itself at one of the calls of its save path."""
    if dies_at_call is not None and int(os.environ.get("RANK", "0")) == 0:
        _die_inside_saves(dies_at_call)
    from samestep.distributed.context import create_run_context
    from samestep.distributed.hardware import detect_hardware
    from samestep.train.train_once import train_once

    loaded = load_config(config)
    with create_run_context(loaded, detect_hardware()) as context:
        train_once(loaded, context, Path(record))


def _die_inside_saves(at: int) -> None:
    from samestep.checkpoint.files import DigestedFile, Files

    left = [at]

    def deadly(whole: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(*args)

        return call

    for owner, names in (
        (Files, ("make_folder", "open_new", "sync", "replace", "copy", "remove")),
        (DigestedFile, ("write",)),
    ):
        for name in names:
            setattr(owner, name, deadly(getattr(owner, name)))


@dataclass
class Chaos:
    """One history of kills."""

    folder: Path
    kills: int
    seed: int
    tell: Callable[[str], None] = print
    counts: Counter[str] = field(default_factory=Counter)
    runs: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def play(self) -> None:
        """Kill until there were enough, then let the last run end; raises what went wrong."""
        self._untouched = self._whole_run(self.folder / "untouched")
        while sum(self.counts.values()) < self.kills:
            self._one_run(self.folder / f"run-{self.runs}")
            self.runs += 1

    def _config(self, run: Path, timeout: float = 8) -> dict[str, Any]:
        """A run that waits no longer for ranks that were killed before they were met."""
        return settings(
            "Slow", run, epochs=None, steps=STEPS, log_every=1, params={"seconds": 0.004},
            checkpoint={"every_steps": 2, "every_epochs": None},
            distributed={"timeout": timeout, "device": "cpu"},
        )  # fmt: skip

    def _whole_run(self, run: Path) -> tuple[str, list[float]]:
        ranks = RankProcesses(train_in_chaos, 1, (self._config(run), str(run / "record"), None))
        answers = ranks.answers()
        assert answers[0][0], answers
        return RunRecord.read(run / "record").state_hash, losses(run)

    def _one_run(self, run: Path) -> None:
        """Kill a run at most a dozen times, then let it end, and compare."""
        self._history: list[str] = []
        for _ in range(12):
            if sum(self.counts.values()) >= self.kills or (run / "record").exists():
                break
            how = self._random.choices(
                [
                    "kill a rank",
                    "kill all ranks",
                    "kill inside a save",
                    "stop",
                    "kill the launcher",
                ],
                [5, 2, 5, 3, 1],
            )[0]
            world = self._random.randint(1, 4)
            if how == "kill the launcher":
                happened = self._kill_launcher(run, world)
            else:
                happened = self._disturb(run, world, how)
            self.counts[how] += happened
            steps = [item.step for item in list_checkpoints(run / "checkpoints", checksums=False)]
            self._history.append(f"{how} on {world}: {steps}")
            self._check(run, how, world)
        world = self._random.randint(1, 4)
        config = self._config(run, timeout=600)
        ranks = RankProcesses(train_in_chaos, world, (config, str(run / "record"), None))
        answers = ranks.answers()
        assert all(ok for ok, _ in answers), answers
        ended = RunRecord.read(run / "record").state_hash, losses(run)
        if ended != self._untouched:
            pairs = zip(ended[1], self._untouched[1], strict=False)
            first = next((step for step, (a, b) in enumerate(pairs) if a != b), None)
            raise AssertionError(
                f"{run} did not end as the untouched run: losses from step {first} on, after "
                f"{self._history}"
            )
        self._check(run, "the end", world)
        self.tell(f"{sum(self.counts.values())} kills; run {self.runs} ended on {world} rank(s)")
        shutil.rmtree(run)

    def _disturb(self, run: Path, world: int, how: str) -> bool:
        inside = self._random.randint(1, 120) if how == "kill inside a save" else None
        ranks = RankProcesses(
            train_in_chaos, world, (self._config(run), str(run / "record"), inside)
        )
        if inside is None:
            time.sleep(self._random.uniform(0.3, 2.5))
        pids = [process.pid for process in ranks.processes if process.is_alive()]
        if how == "kill all ranks":
            for pid in pids:
                kill(pid, signal.SIGKILL)
        elif how != "kill inside a save" and pids:
            number = signal.SIGTERM if how == "stop" else signal.SIGKILL
            kill(self._random.choice(pids), number)
        started = time.monotonic()
        answers = ranks.answers()
        if how not in ("kill inside a save", "stop"):
            assert time.monotonic() - started < SECONDS_TO_END, f"{how}: ranks did not end in time"
        # Only what happened counts: a run may end, or never save as often, before it is hit.
        killed = any(process.exitcode == -signal.SIGKILL for process in ranks.processes)
        return killed or any("Stopped: SIGTERM" in str(text) for _, text in answers)

    def _kill_launcher(self, run: Path, world: int) -> bool:
        """With the real command, whose ranks must not go on without it."""
        file = run.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(self._config(run)))
        process = popen(
            command("launch", file, "--nproc", str(world)),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(self._random.uniform(0.3, 6.0))
        alive = process.poll() is None
        process.kill()
        process.wait()
        deadline = time.monotonic() + SECONDS_TO_END
        while processes_of(file):
            assert time.monotonic() < deadline, "ranks outlived their launcher"
            time.sleep(0.1)
        return alive

    def _check(self, run: Path, how: str, world: int) -> None:
        found = list_checkpoints(run / "checkpoints", checksums=True)
        wrong = [f"{item.folder}: {item.wrong}" for item in found if item.wrong]
        assert not wrong, f"{how} on {world} rank(s) left {wrong}"


def kill(pid: int | None, number: signal.Signals) -> None:
    try:
        os.kill(pid or 0, number)
    except ProcessLookupError:
        return  # it was faster


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        chaos = Chaos(Path(folder), arguments.kills, arguments.seed)
        chaos.play()
        minutes = (time.monotonic() - started) / 60
    print(
        f"{sum(chaos.counts.values())} kills ({dict(chaos.counts)}), seed {arguments.seed}: every "
        f"one of {chaos.runs} runs ended with the untouched run's bits; {minutes:.1f} minutes"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
