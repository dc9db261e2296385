"""What activity tracking and the heartbeat add to a step of about one millisecond.

    python benchmarks/heartbeat.py [--rounds 30] [--json FILE]

A step of small matrix products runs interleaved: bare; with every call that a step of four lanes on
a rank makes to its `Activity` (ten changes of phase, four collectives); and with the heartbeat
thread running, which reports to a store about once a second. The bare step runs twice, to show
how far the ratios can be trusted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore

from samestep.distributed.health.activity import DATA, Activity
from samestep.distributed.health.heartbeat import Heartbeat

GOAL = 1.01
LANES, COLLECTIVES = 4, 4
SECONDS = 0.5
"""The length of one turn."""


def calibrated() -> Callable[[], None]:
    """Work of about a millisecond."""
    a = torch.randn(64, 64)
    started = time.perf_counter()
    for _ in range(500):
        a @ a
    times = max(1, round(1e-3 / ((time.perf_counter() - started) / 500)))

    def work() -> None:
        for _ in range(times):
            a @ a

    return work


def with_activity(work: Callable[[], None], activity: Activity) -> Callable[[], None]:
    def step() -> None:
        activity.begin_step(activity.step + 1)
        for _ in range(LANES):
            before = activity.enter(DATA)
            activity.enter(before)
        work()
        for _ in range(COLLECTIVES):
            with activity.waiting("gradients"):
                pass
        activity.end_step()

    return step


def seconds_per_step(step: Callable[[], None]) -> float:
    started, steps = time.perf_counter(), 0
    while time.perf_counter() - started < SECONDS:
        for _ in range(50):
            step()
        steps += 50
    return (time.perf_counter() - started) / steps


def measure(rounds: int) -> dict[str, float]:
    work, activity = calibrated(), Activity()
    store = TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
    taken: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        turns = {"bare": work, "bare, again": work, "activity": with_activity(work, activity)}
        times = {name: seconds_per_step(step) for name, step in turns.items()}
        heartbeat = Heartbeat(store, 0, 1, activity, timeout=600.0)
        times["activity and heartbeat"] = seconds_per_step(turns["activity"])
        heartbeat.stop()
        if number:
            for name, seconds in times.items():
                taken.setdefault(name, []).append(seconds / times["bare"])
    print(f"a bare step takes {times['bare'] * 1e3:.2f} ms")
    return {name: statistics.median(ratios) for name, ratios in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ratios = measure(arguments.rounds)
    table = Table("step", "ratio", title=f"goal: at most {GOAL}")
    for name, ratio in ratios.items():
        table.add_row(name, f"{ratio:.4f}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(ratios, indent=2))


if __name__ == "__main__":
    main()
