"""What the benchmarks share: taking turns, medians of ratios, ranks, tables.

Variants take short turns in rotating order, and some turns of each are a round. A disturbance
of the machine that lasts longer than a turn affects all of them; the median over the rounds'
ratios removes the rest.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor

from samestep.bench.statistics import spread_of

THREADS = 1
QUICK_ROUNDS = 3

Variant = Generator[None, None, None]
"""Runs one training step for each `next()`."""


# -- timing --------------------------------------------------------------------------------


def median_step(steps: Iterator[None], device: torch.device, warm_up: int) -> float:
    """Return the median seconds of a step, without the first ones."""
    spent, before = [], time.perf_counter()
    for _ in steps:
        if device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        spent.append(now - before)
        before = now
    return statistics.median(spent[warm_up:])


def time_rounds(
    variants: Mapping[str, Callable[[], None]], rounds: int, turns: int, device: torch.device
) -> dict[str, Tensor]:
    """For each variant, a row per counted round: wall seconds and processor seconds."""
    names = list(variants)
    spent = {name: torch.zeros(rounds + 1, 2, dtype=torch.float64) for name in names}
    for number in range(rounds + 1):
        for turn in range(turns):
            first = (number + turn) % len(names)
            for name in names[first:] + names[:first]:
                spent[name][number] += time_once(variants[name], device)
    return {name: over_ranks(table[1:].clone()) for name, table in spent.items()}


def time_once(work: Callable[[], None], device: torch.device) -> Tensor:
    together(device)
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    spent = [time.perf_counter() - wall, time.process_time() - cpu]
    return torch.tensor(spent, dtype=torch.float64)


def together(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def over_ranks(table: Tensor) -> Tensor:
    """Return the slowest rank's wall time and all ranks' processor time."""
    if dist.is_initialized():
        wall, cpu = table.unbind(1)
        wall, cpu = wall.contiguous(), cpu.contiguous()
        dist.all_reduce(wall, dist.ReduceOp.MAX)
        dist.all_reduce(cpu)
        table = torch.stack([wall, cpu], dim=1)
    return table


def milliseconds(table: Tensor, steps: int) -> float:
    """Return the wall time of a step in the median round."""
    return float(1e3 * statistics.median(table[:, 0].tolist()) / steps)


def ratio_to(reference: Tensor, table: Tensor) -> tuple[float, float, float]:
    """Return the median of the rounds' ratios of wall time, and its confidence range."""
    found = spread_of((table / reference)[:, 0].tolist())
    return found.median, found.low, found.high


def cpu_ratio_to(reference: Tensor, table: Tensor) -> float:
    """Return the median of the rounds' ratios of processor time."""
    return float(statistics.median((table / reference)[:, 1].tolist()))


# -- one process, and several --------------------------------------------------------------


def on_ranks(world: int, work: Callable[..., Any], *args: Any) -> Any:
    """Return the result of `work(*args)` on rank 0 of new processes; with one there is no process group."""
    # torch.set_num_threads alone does not affect every library that torch calls, and this
    # variable is read when torch is imported: hence a new process even for a single rank.
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.pt"
        mp.spawn(_rank_main, (world, free_port(), str(answer), work, args), nprocs=world)
        return torch.load(answer, weights_only=False)


def _rank_main(rank: int, world: int, port: int, answer: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    logging.disable(logging.INFO)
    torch.set_num_threads(THREADS)
    with ExitStack() as stack:
        if world > 1:
            open_group(rank, world, port)
            stack.callback(dist.destroy_process_group)
        result = work(*args)
        if rank == 0:
            torch.save(result, answer)
        if world > 1:
            dist.barrier()


def open_group(rank: int, world: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    dist.init_process_group("gloo")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# -- showing -------------------------------------------------------------------------------


def goal_cell(ratio: float, goal: float | None) -> str:
    if goal is None:
        return ""
    met = ratio <= goal
    return f"[{'green' if met else 'red'}]<= {goal:.2f} {'met' if met else 'missed'}[/]"


def machine(device: torch.device) -> dict[str, Any]:
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": f"{device.type} ({kind})",
        "cpus": os.cpu_count(),
        "threads": THREADS,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def show(tables: Sequence[Table], facts: Mapping[str, Any], rounds: int, notes: Sequence[str] = ()) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    shown = ", ".join(f"{name} {value}" for name, value in facts.items())
    console.print(f"{shown}; {rounds} rounds after a warm-up", highlight=False)
    for table in tables:
        console.print(table)
    for note in notes:
        console.print(note, highlight=False)


def write_json(path: Path | None, facts: Mapping[str, Any], results: Sequence[Any], **more: Any) -> None:
    """Write the results, each a dataclass, as JSON."""
    if path is not None:
        rows = [asdict(result) for result in results]
        document = {"machine": dict(facts), **more, "results": rows}
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def common_options(description: str, rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, help=f"number of rounds (default: {rounds})")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ROUNDS} rounds, to check that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    return parser


def rounds_of(options: argparse.Namespace, rounds: int) -> int:
    """Return the number of rounds: `--rounds` if given, a few with `--quick`, otherwise the default."""
    return int(options.rounds or (QUICK_ROUNDS if options.quick else rounds))


def device_of(options: argparse.Namespace) -> torch.device:
    on_gpu = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda", 0) if on_gpu else torch.device("cpu")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
