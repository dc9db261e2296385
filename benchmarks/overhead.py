"""What a step driven by samestep costs against the hand-written loop.

    python benchmarks/overhead.py [--quick] [--rounds N] [--worlds 1,2] [--device cpu|cuda]
                                  [--json FILE]

Every contestant has its own model, optimizer and loader, and all live in the same process (at
two ranks: in the same two processes, on the same process group). They take short turns, in an
order that rotates, and some turns of each are a round. What disturbs the machine for longer
than a turn disturbs all of them; the median over the rounds' ratios drops the rest. The first
round warms up and is not counted. The hand-written loop runs twice: the ratio of the second
to the first, which should be 1, shows how far the others can be trusted.

Two ratios are shown. `time` is wall time, what a user waits for. `CPU` is processor time,
summed over threads and ranks: other programs on the machine hardly disturb it, but it sees
neither waiting nor the GPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samestep

GOAL = 1.03
THREADS = 1
READ_EVERY = 10
"""Steps between two readings of the loss, in every contestant."""
EPOCH_STEPS = 200
GPU_STEPS = 100
"""Steps in a turn on a GPU: many, since each turn ends with waiting for the device."""
HAND_WRITTEN = "hand-written"
CONTROL = "hand-written, again"


@dataclass(frozen=True)
class Workload:
    """A model with its data; `batch` is what one rank gets in one step."""

    name: str
    batch: int
    turns: int
    """How often it is each contestant's turn in one round (on a GPU: once)."""
    steps: int
    """Steps in a turn. A round's steps are a multiple of READ_EVERY."""
    model: Callable[[], nn.Module]
    data: Callable[[int], TensorDataset]


@dataclass(frozen=True)
class Result:
    """One contestant beside the one it is compared with."""

    workload: str
    world: int
    contestant: str
    milliseconds: float
    ratio: float
    low: float
    high: float
    """`low` to `high` holds the true median ratio in about 95 of 100 runs."""
    cpu_ratio: float
    rounds: int
    goal: float | None = None


# -- workloads -----------------------------------------------------------------------------


def mlp(layers: int, width: int, classes: int = 10) -> nn.Module:
    hidden = [m for _ in range(layers - 1) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, classes))


def vectors(samples: int, width: int, classes: int = 10) -> TensorDataset:
    return TensorDataset(torch.randn(samples, width), torch.randint(classes, (samples,)))


class Transformer(nn.Module):
    """A small causal language model with dropout."""

    def __init__(self, layers: int, width: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(tokens, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position
        logits: Tensor = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return logits


def texts(samples: int, vocabulary: int, tokens: int) -> TensorDataset:
    text = torch.randint(vocabulary, (samples, tokens + 1))
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


WORKLOADS = (
    Workload(
        "MLP 4x256, batch 128", 128, 5, 10,
        lambda: mlp(4, 256), lambda samples: vectors(samples, 256),
    ),
    Workload(
        "transformer 4x128, batch 4x64", 4, 10, 1,
        lambda: Transformer(4, 128, 256, 64), lambda samples: texts(samples, 256, 64),
    ),
)  # fmt: skip


def loss_of(model: nn.Module, x: Tensor, y: Tensor, reduction: str) -> Tensor:
    logits = model(x)
    return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction=reduction)


def optimizer_of(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-4)


# -- contestants ---------------------------------------------------------------------------

Contestant = Generator[None, None, None]
"""Makes one step whenever it is advanced."""


@dataclass(frozen=True)
class Place:
    """Where the contestants run."""

    world: int
    device: torch.device


def hand_written(workload: Workload, dataset: TensorDataset, place: Place) -> Contestant:
    """What a person writes without samestep; on several ranks, with torch's own tools."""
    model = workload.model().to(place.device)
    if place.world > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = optimizer_of(model)
    loader, sampler = hand_written_loader(workload, dataset, place)
    steps, losses = 0, []
    for epoch in count():
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            x, y = (tensor.to(place.device, non_blocking=True) for tensor in batch)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, x, y, "mean")
            loss.backward()
            optimizer.step()
            steps += 1
            if steps % READ_EVERY == 0:
                losses.append(loss.item())
            yield


def hand_written_loader(
    workload: Workload, dataset: TensorDataset, place: Place
) -> tuple[DataLoader[Any], DistributedSampler[Any] | None]:
    sampler: DistributedSampler[Any] | None = None
    if place.world > 1:
        sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(
        dataset,
        batch_size=workload.batch,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=0,
        drop_last=True,
        pin_memory=place.device.type == "cuda",
    )
    return loader, sampler


def driven_by_samestep(run: samestep.Run, workload: Workload, dataset: TensorDataset) -> Contestant:
    """The same loop in a run of samestep."""
    model = workload.model()
    model, optimizer = run.prepare(model, optimizer_of(model))
    for step in run.steps(dataset):
        for batch in step.lanes:
            loss = loss_of(model, batch.x, batch.y, "sum")
            step.backward(loss, count=batch.y.numel())
        step.update(optimizer)
        yield


def open_run(workload: Workload, place: Place, same: str, folder: Path) -> samestep.Run:
    """A run of one lane per rank that is longer than any benchmark."""
    return samestep.start(
        {
            "task": "none.py:None",  # a run needs one; our own loop never asks for it
            "run_dir": str(folder),
            "steps": 10**9,
            "global_batch": workload.batch * place.world,
            "lanes": place.world,
            "same": same,
            "drop_last": True,
            "log_every": READ_EVERY,
            "checkpoint": {"enabled": False},  # saving has a benchmark of its own
            "loader": {"workers": 0},
            "distributed": {"device": place.device.type, "threads_per_rank": THREADS},
        }
    )


def open_contestants(
    workload: Workload, place: Place, by_hand: Sequence[str], levels: Sequence[str],
    stack: ExitStack,
) -> dict[str, Contestant]:  # fmt: skip
    """Hand-written loops by these names, then samestep at these levels of sameness."""
    dataset = workload.data(workload.batch * place.world * EPOCH_STEPS)
    contestants = {name: hand_written(workload, dataset, place) for name in by_hand}
    folder = [stack.enter_context(tempfile.TemporaryDirectory(prefix="samestep-benchmark-"))]
    if place.world > 1:
        dist.broadcast_object_list(folder)  # all ranks of a run have one folder: rank 0's
    for same in levels:
        name = f"samestep, {same}"
        run = stack.enter_context(open_run(workload, place, same, Path(folder[0]) / same))
        contestants[name] = driven_by_samestep(run, workload, dataset)
        stack.callback(contestants[name].close)  # before its run is closed
    return contestants


# -- timing --------------------------------------------------------------------------------


def time_rounds(
    contestants: Mapping[str, Callable[[], None]], rounds: int, turns: int, device: torch.device
) -> dict[str, Tensor]:
    """For each contestant, a row per counted round: wall seconds and processor seconds."""
    names = list(contestants)
    spent = {name: torch.zeros(rounds + 1, 2, dtype=torch.float64) for name in names}
    for number in range(rounds + 1):
        for turn in range(turns):
            first = (number + turn) % len(names)
            for name in names[first:] + names[:first]:
                spent[name][number] += time_once(contestants[name], device)
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
    """The slowest rank's wall time and all ranks' processor time."""
    if dist.is_initialized():
        wall, cpu = table.unbind(1)
        wall, cpu = wall.contiguous(), cpu.contiguous()
        dist.all_reduce(wall, dist.ReduceOp.MAX)
        dist.all_reduce(cpu)
        table = torch.stack([wall, cpu], dim=1)
    return table


def turns_of(contestants: Mapping[str, Contestant], steps: int) -> dict[str, Callable[[], None]]:
    """What each contestant does when it is its turn."""

    def turn_of(contestant: Contestant) -> Callable[[], None]:
        def work() -> None:
            for _ in range(steps):
                next(contestant)

        return work

    return {name: turn_of(contestant) for name, contestant in contestants.items()}


def compare(
    workload: str, world: int, spent: Mapping[str, Tensor], steps: int, goals: Mapping[str, float]
) -> list[Result]:
    """Every contestant beside the first; `steps` is how many a round has."""
    reference = next(iter(spent.values()))
    results = []
    for name, table in spent.items():
        wall, cpu = (table / reference).unbind(1)
        low, high = range_of_median(sorted(wall.tolist()))
        results.append(
            Result(
                workload=workload,
                world=world,
                contestant=name,
                milliseconds=1e3 * statistics.median(table[:, 0].tolist()) / steps,
                ratio=statistics.median(wall.tolist()),
                low=low,
                high=high,
                cpu_ratio=statistics.median(cpu.tolist()),
                rounds=len(table),
                goal=goals.get(name),
            )
        )
    return results


def range_of_median(ordered: Sequence[float]) -> tuple[float, float]:
    """Between which of the ordered values the median lies, with about 95 % confidence."""
    middle, reach = (len(ordered) - 1) / 2, 0.98 * math.sqrt(len(ordered))
    low, high = math.floor(middle - reach), math.ceil(middle + reach)
    return ordered[max(0, low)], ordered[min(len(ordered) - 1, high)]


# -- one process, and several --------------------------------------------------------------


def measure(workload: Workload, place: Place, rounds: int) -> list[Result]:
    """All contestants of one workload on this process, or on this rank and the others."""
    by_hand = [HAND_WRITTEN, CONTROL]
    levels = ["bits"] if place.world == 1 else ["bits", "rounding"]
    spent, steps = race(workload, place, by_hand, levels, rounds)
    goals = {f"samestep, {same}": GOAL for same in levels}
    return compare(workload.name, place.world, spent, steps, goals)


def race(
    workload: Workload, place: Place, by_hand: Sequence[str], levels: Sequence[str], rounds: int
) -> tuple[dict[str, Tensor], int]:
    """What each contestant spent in each round, and how many steps a round had."""
    on_gpu = place.device.type == "cuda"
    turns, steps = (1, GPU_STEPS) if on_gpu else (workload.turns, workload.steps)
    with ExitStack() as stack:
        contestants = open_contestants(workload, place, by_hand, levels, stack)
        spent = time_rounds(turns_of(contestants, steps), rounds, turns, place.device)
    return spent, turns * steps


def measure_all(place: Place, rounds: int) -> list[Result]:
    return [result for workload in WORKLOADS for result in measure(workload, place, rounds)]


def on_ranks(world: int, work: Callable[..., Any], *args: Any) -> Any:
    """What `work(*args)` gives on rank 0 of so many new processes, or in one without a group."""
    # torch.set_num_threads alone does not bind every library that torch calls, and this
    # variable is read when torch is imported: hence a new process also for a world of one.
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.pt"
        mp.spawn(_rank_main, (world, free_port(), str(answer), work, args), nprocs=world)
        return torch.load(answer, weights_only=False)


def _rank_main(
    rank: int, world: int, port: int, answer: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
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


def result_table(title: str, unit: str, results: Sequence[Result]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("workload", "ranks", "contestant"):
        table.add_column(column, no_wrap=True)
    for column in (unit, "time ratio", "95% range", "goal", "CPU ratio"):
        table.add_column(column, justify="right")
    before = None
    for result in results:
        here = (result.workload, str(result.world))
        if before not in (None, here):
            table.add_section()
        table.add_row(
            *(("", "") if here == before else here), result.contestant,
            f"{result.milliseconds:.3f}", f"{result.ratio:.3f}",
            f"{result.low:.3f}-{result.high:.3f}", goal_cell(result), f"{result.cpu_ratio:.3f}",
        )  # fmt: skip
        before = here
    return table


def goal_cell(result: Result) -> str:
    if result.goal is None:
        return ""
    met = result.ratio <= result.goal
    return f"[{'green' if met else 'red'}]<= {result.goal:.2f} {'met' if met else 'missed'}[/]"


def machine(device: torch.device) -> dict[str, Any]:
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": f"{device.type} ({kind})",
        "cpus": os.cpu_count(),
        "threads": THREADS,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def show(tables: Sequence[Table], facts: Mapping[str, Any], rounds: int) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    said = ", ".join(f"{name} {value}" for name, value in facts.items())
    console.print(f"{said}; {rounds} rounds after a warm-up round", highlight=False)
    for table in tables:
        console.print(table)


def write_json(path: Path | None, facts: Mapping[str, Any], results: Sequence[Result]) -> None:
    if path is not None:
        document = {"machine": dict(facts), "results": [asdict(result) for result in results]}
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def common_options(description: str, rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds that count")
    parser.add_argument("--quick", action="store_true", help="3 rounds: does it run at all?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    return parser


def main() -> None:
    parser = common_options("What a step costs with samestep and without.", rounds=12)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--worlds", default="1,2", help="numbers of ranks; on a GPU only 1 runs")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    on_gpu = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    worlds = [1] if on_gpu else [int(world) for world in options.worlds.split(",")]

    results: list[Result] = []
    for world in worlds:
        results += on_ranks(world, measure_all, Place(world, device), rounds)
    facts = machine(device)
    show([result_table("A step, by hand and by samestep", "ms/step", results)], facts, rounds)
    write_json(options.json, facts, results)


if __name__ == "__main__":
    main()
