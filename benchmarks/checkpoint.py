"""How long a save blocks the training, compared with a plain synchronous `torch.save`.

    python benchmarks/checkpoint.py [--megabytes 500] [--rounds 7] [--device cpu|cuda]
                                    [--json FILE]

The state is a model and its AdamW moments. The contestants take turns on the same state and
the same disk: `torch.save` of the whole state (no checksums, no fsync: the minimum that a
person would write), samestep's save with its defaults, and samestep's with
`asynchronous: false`. For each, the time until training could continue is measured. Then the
speed of steps during a write is compared with that of steps without one.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from samestep.config import load_config
from samestep.data.batch import Position
from samestep.distributed.context import SingleProcessContext
from samestep.train.saver import Saver

GOALS = {"cpu": 0.2, "cuda": 0.1}
WIDTH = 2048


class Contest:
    """One state that is saved in several ways."""

    def __init__(self, folder: Path, megabytes: int, device: str) -> None:
        self.folder = folder
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
        layers = max(1, round(megabytes * 1e6 / 3 / 4 / WIDTH**2))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.step()
        self.bytes = 3 * sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.savers = {how: self._saver(how) for how in (True, False)}
        self.saves = 0

    def _saver(self, asynchronous: bool) -> Saver:
        config = load_config(
            {
                "global_batch": 1,
                "lanes": 1,
                "steps": 1,
                "checkpoint": {"asynchronous": asynchronous, "keep_last": 1},
            }
        )
        context = SingleProcessContext(self.device)
        folder = self.folder / f"asynchronous-{asynchronous}"
        saver = Saver(config, context, folder, None)
        saver.prepare([self.model], [self.optimizer], [])
        return saver

    def step(self) -> None:
        """A small training step, to see how much a write slows it down."""
        x = torch.randn(8, WIDTH, device=self.device)
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()

    def wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def torch_save(self) -> None:
        path = self.folder / "plain.pt"
        torch.save(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path
        )

    def samestep_save(self, asynchronous: bool) -> None:
        self.saves += 1
        self.savers[asynchronous].save(Position(step=self.saves), {}, None)

    def blocked(self, save: Callable[[], None]) -> float:
        """Seconds until training could continue; nothing else is being written meanwhile."""
        self.wait_for_device()
        started = time.perf_counter()
        save()
        seconds = time.perf_counter() - started
        for saver in self.savers.values():
            saver.wait()
        return seconds

    def steps_per_second(self, seconds: float) -> float:
        self.wait_for_device()
        started, steps = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            self.step()
            steps += 1
        self.wait_for_device()
        return steps / (time.perf_counter() - started)


def measure(contest: Contest, rounds: int) -> dict[str, Any]:
    """Seconds blocked by each way to save, and the slowdown of steps during a write."""
    ways: dict[str, Callable[[], None]] = {
        "torch.save": contest.torch_save,
        "samestep": lambda: contest.samestep_save(True),
        "samestep, asynchronous: false": lambda: contest.samestep_save(False),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    beside: list[float] = []
    for number in range(rounds + 1):
        taken = {name: contest.blocked(save) for name, save in ways.items()}
        alone = contest.steps_per_second(1.0)
        contest.samestep_save(True)
        together = contest.steps_per_second(1.0)
        contest.savers[True].wait()
        if number:  # the first round allocates and warms up
            for name, seconds in taken.items():
                times[name].append(seconds)
            beside.append(alone / together)
    plain = times["torch.save"]
    return {
        "bytes": contest.bytes,
        "device": contest.device.type,
        "machine": platform.machine(),
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "ratio": {
            name: statistics.median(a / b for a, b in zip(values, plain, strict=True))
            for name, values in times.items()
        },
        "step_beside_a_write": statistics.median(beside),
        "goal": GOALS[contest.device.type],
    }


def show(result: dict[str, Any]) -> None:
    table = Table("save", "blocked", "ratio", title=f"{result['bytes'] / 1e6:.0f} MB of state")
    for name, seconds in result["seconds"].items():
        table.add_row(name, f"{seconds * 1e3:.1f} ms", f"{result['ratio'][name]:.3f}")
    console = Console()
    console.print(table)
    console.print(
        f"goal: samestep at most {result['goal']}; a step while a save is written takes "
        f"{result['step_beside_a_write']:.2f} times as long"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        contest = Contest(folder, arguments.megabytes, arguments.device)
        result = measure(contest, arguments.rounds)
    finally:
        shutil.rmtree(folder)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
