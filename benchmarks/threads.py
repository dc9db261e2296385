"""Threads against ranks on one machine: a step with the same global batch, by N threads or by N ranks.

Each variant is a world of processes that stays, and trains some steps whenever it is its turn; the others wait meanwhile
without using a processor. A round is a turn of each, in rotating order, and gives one ratio to the single thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.bench.statistics import spread_of

WIDTHS = {"small": 64, "middle": 256, "large": 1024}
BATCH = 256
STEPS = {"small": 40, "middle": 20, "large": 4}
"""Of one turn, which takes about a tenth of a second on an idle core."""


@dataclass
class World:
    """Ranks that wait for their turn."""

    ranks: int
    threads: int
    processes: list[subprocess.Popen[str]]

    @property
    def name(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{ranks} x {self.threads} thread{'s' * (self.threads > 1)}"

    def turn(self, steps: int) -> tuple[float, float]:
        """Wall seconds of the slowest rank, and processor seconds of all."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            answers.append([float(word) for word in process.stdout.readline().split()])
        return max(wall for wall, _ in answers), sum(cpu for _, cpu in answers)

    def end(self) -> None:
        for process in self.processes:
            process.communicate()


def start(ranks: int, threads: int, width: int, folder: Path) -> World:
    """Return a world that has joined and warmed up."""
    meeting = folder / f"{ranks}-{threads}-{width}"
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                __file__,
                "--rank",
                str(rank),
                "--world",
                str(ranks),
                "--width",
                str(width),
                "--meeting",
                str(meeting),
            ],
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    world = World(ranks, threads, processes)
    world.turn(3)
    return world


def work(rank: int, world: int, width: int, meeting: str) -> None:
    """One rank: an MLP of four layers on its share of the batch, gradients averaged by all-reduce."""
    import torch
    import torch.distributed as dist
    from torch import nn

    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(width, width), nn.ReLU())]
    model: nn.Module = nn.Sequential(*layers)
    if world > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(BATCH // world, width)
    for line in sys.stdin:
        if world > 1:
            dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        print(time.perf_counter() - wall, time.process_time() - cpu, flush=True)
    if world > 1:
        dist.destroy_process_group()


def measure(size: str, counts: Sequence[int], rounds: int) -> list[dict[str, object]]:
    """Return a row for each variant: time against one thread."""
    shapes = [(1, 1), *((1, n) for n in counts), *((n, 1) for n in counts)]
    with tempfile.TemporaryDirectory() as folder:
        worlds = [start(ranks, threads, WIDTHS[size], Path(folder)) for ranks, threads in shapes]
        spent: dict[str, list[tuple[float, float]]] = {world.name: [] for world in worlds}
        for number in range(rounds):
            first = number % len(worlds)
            for world in worlds[first:] + worlds[:first]:
                spent[world.name].append(world.turn(STEPS[size]))
        for world in worlds:
            world.end()
    alone = spent[worlds[0].name]
    rows: list[dict[str, object]] = []
    for name, times in spent.items():
        walls = spread_of([mine[0] / his[0] for mine, his in zip(times, alone, strict=True)])
        cpus = spread_of([mine[1] / his[1] for mine, his in zip(times, alone, strict=True)])
        rows.append(
            {"size": size, "variant": name, "ratio": walls.median, "low": walls.low,
             "high": walls.high, "cpu_ratio": cpus.median, "rounds": rounds}
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", default="2", help="numbers of threads and of ranks, such as 2,4")
    parser.add_argument("--sizes", default="small,middle,large")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--json", type=Path, help="also write the results here")
    for name, kind in (("rank", int), ("world", int), ("width", int), ("meeting", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return work(args.rank, args.world, args.width, args.meeting)
    counts = [int(word) for word in args.counts.split(",")]
    found = []
    for size in args.sizes.split(","):
        for row in measure(size, counts, 3 if args.quick else args.rounds):
            found.append(row)
            print(
                f"{size:7} {row['variant']:18} time {row['ratio']:.2f} ({row['low']:.2f}-{row['high']:.2f})"
                f"  processor time {row['cpu_ratio']:.2f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"batch": BATCH, "widths": WIDTHS, "rows": found}))
    return None


if __name__ == "__main__":
    main()
