"""Where a step with one lane a rank spends its time, beside DistributedDataParallel's.

    python benchmarks/step_parts.py [--workload mlp|conv|transformer] [--size small|medium|large]
                                    [--samples N] [--worlds 1,2,4] [--rounds N] [--json FILE]

Both loops run in the same processes, on one task, interleaved, and the same calls of both are timed: reading a
batch, the forward pass, the backward pass (DDP's exchange is inside of it), samestep's wait for other ranks'
gradients, the optimizer's step. What is left of a step is the loop's own. Of each part the table has the
median over rounds of a step's mean on the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src")]

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch.optim import Optimizer  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from samestep.bench.baselines import LoopContext, open_ddp, open_samestep  # noqa: E402
from samestep.bench.scaling import KeepingSettings  # noqa: E402
from samestep.bench.workloads import Workload, WorkloadTask, workload_of  # noqa: E402
from samestep.config import Config  # noqa: E402
from samestep.distributed.context import RunContext, create_run_context  # noqa: E402
from samestep.distributed.hardware import detect_hardware  # noqa: E402
from samestep.distributed.logging import LOGGER  # noqa: E402
from samestep.reduce.tree_sum import TreeSum  # noqa: E402
from samestep.step.step_batches import StepBatches  # noqa: E402
from samestep.train.quiet_run import reading_once  # noqa: E402

PARTS = ("data", "forward", "backward", "exchange", "optimizer", "rest")
WARM_UP = 5
SECONDS, FEWEST, MOST = 0.4, 3, 60
"""How long a turn is, about, and its steps."""
T = TypeVar("T")


class Clock:
    """Seconds of the parts of steps, on this rank."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, part: str, call: Callable[..., T]) -> Callable[..., T]:
        def timed_call(*args: Any, **kwargs: Any) -> T:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - began

        return timed_call


class TimedTask(WorkloadTask):
    """A built-in task whose forward pass and optimizer are timed."""

    clock: Clock

    def loss(self, model: Any, batch: Any) -> Any:
        return self.clock.timed("forward", super().loss)(model, batch)

    def optimizers(self, model: Any) -> Optimizer:
        optimizer = super().optimizers(model)
        optimizer.step = self.clock.timed("optimizer", optimizer.step)  # type: ignore[method-assign]
        return optimizer


@contextmanager
def timing(clock: Clock) -> Iterator[None]:
    """Time the calls that both loops make into torch, and our exchange."""
    places: list[tuple[Any, str, str]] = [
        (type(iter(DataLoader([0]))), "__next__", "data"),
        (StepBatches, "read", "data"),
        (torch.Tensor, "backward", "backward"),
        (TreeSum, "exchange", "exchange"),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, part in places:
        setattr(owner, name, clock.timed(part, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, before in kept:
            setattr(owner, name, before)


def measure(context: RunContext, config: Config, workload: Workload, rounds: int) -> Any:
    """Seconds of each part for each loop, of every round; every rank gets the same."""
    clock, hardware = Clock(), detect_hardware()
    batch = workload.batch * context.world
    config = config.model_copy(update={"global_batch": batch, "lanes": context.world})
    task = TimedTask(workload, batch)
    task.clock = clock
    found: dict[str, list[dict[str, float]]] = {"ddp": [], "samestep": [], "ddp again": []}
    with ExitStack() as stack, timing(clock):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        turns = {}
        for loop in found:
            opened_in = LoopContext(reading_once(task), config, context, hardware, folder / loop, stack)
            opened = open_ddp if loop.startswith("ddp") else lambda one: open_samestep(one)[0]
            turns[loop] = KeepingSettings(lambda context=opened_in, opened=opened: opened(context))
            turns[loop](WARM_UP)
        began = time.perf_counter()
        turns["ddp"](FEWEST)
        once = max(context.gather((time.perf_counter() - began) / FEWEST))
        steps = max(FEWEST, min(MOST, round(SECONDS / once)))
        for number in range(rounds):
            first = number % len(turns)
            names = list(turns)
            for loop in names[first:] + names[:first]:
                clock.seconds.clear()
                context.barrier()
                began = time.perf_counter()
                turns[loop](steps)
                whole = time.perf_counter() - began
                clock.seconds["rest"] = whole - sum(clock.seconds.values())
                mine = {part: clock.seconds[part] / steps for part in PARTS}
                ranks = context.gather(mine | {"step": whole / steps})
                found[loop].append({part: max(rank[part] for rank in ranks) for part in ranks[0]})
    return found


def as_rank(args: argparse.Namespace) -> None:
    LOGGER.setLevel(logging.ERROR)
    config = Config(seed=1, steps=1, global_batch=64, lanes=64)
    with create_run_context(config, detect_hardware()) as context:
        workload = workload_of(args.workload, args.size)
        if args.samples is not None:
            workload = replace(workload, batch=args.samples)
        found = measure(context, config, workload, args.rounds)
        if context.is_main:
            Path(args.json).write_text(json.dumps(found), encoding="utf-8")


def shown(world: int, found: dict[str, list[dict[str, float]]], console: Console) -> None:
    table = Table(title=f"{world} ranks: milliseconds of a step")
    for column in ("", "step", *PARTS, "to ddp"):
        table.add_column(column, justify="right")
    for loop, rounds in found.items():
        middle = {p: statistics.median(one[p] for one in rounds) for p in ("step", *PARTS)}
        ratio = [a["step"] / b["step"] for a, b in zip(rounds, found["ddp"], strict=True)]
        low, high = min(ratio), max(ratio)
        cells = [f"{1e3 * middle[p]:.3f}" for p in ("step", *PARTS)]
        table.add_row(loop, *cells, f"{statistics.median(ratio):.3f} ({low:.2f} - {high:.2f})")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workload", default="mlp", choices=("mlp", "conv", "transformer"))
    parser.add_argument("--size", default="small", choices=("small", "medium", "large"))
    parser.add_argument("--samples", type=int, help="of a lane")
    parser.add_argument("--worlds", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    args = parser.parse_args()
    if "RANK" in os.environ:
        as_rank(args)
        return
    results = {}
    for world in map(int, args.worlds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "parts.json"
            subprocess.run(
                [
                    sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world),
                    "--standalone", __file__,
                    "--workload", args.workload, "--size", args.size, "--rounds", str(args.rounds),
                    "--json", str(output),
                    *([] if args.samples is None else ["--samples", str(args.samples)]),
                ],
                check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            results[world] = json.loads(output.read_text(encoding="utf-8"))
        shown(world, results[world], Console())
    if args.json:
        Path(args.json).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
