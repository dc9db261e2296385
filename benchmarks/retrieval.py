"""What exact retrieval costs, and whether its memory stays below what is announced.

    python benchmarks/retrieval.py [--quick] [--rows N] [--size D] [--classes C] [--worlds 4,1] [--json FILE]

Every row is a query among all others, by precision at 1, R-precision, MAP@R and the mean reciprocal rank.
Each rank makes its own rows. `memory` is what the process of the hungriest rank grew by at most, `announced`
what `samestep` says before it starts. It fails if that is not enough, or if two worlds give other values.
`CPU seconds` are those of all ranks together. On gloo, one thread per rank; with more ranks than CPUs, seconds are those of all ranks sharing the CPUs.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist
from measuring import common_options, machine, on_ranks, write_json
from rich.console import Console
from rich.table import Table

from samestep.config.evaluation import RETRIEVAL_METRICS
from samestep.distributed.collectives import Collectives, SoloCollectives, TorchCollectives
from samestep.distributed.health.activity import Activity
from samestep.evaluation.retrieval.measures import measure_shared, memory_needed
from samestep.evaluation.retrieval.search import QUERY_BLOCK, SharedRows
from samestep.reduce.row_shards import RowExchange, ShardPlan

CPU = torch.device("cpu")
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Measured:
    """One world's retrieval."""

    rows: int
    size: int
    classes: int
    world: int
    seconds: float
    cpu_seconds: float
    """Of all ranks."""
    megabytes: float
    announced: float
    values: dict[str, float]


def retrieve(rows: int, size: int, classes: int) -> Measured:
    """On this rank and the others."""
    collectives: Collectives = SoloCollectives(Activity())
    if dist.is_initialized():
        collectives = TorchCollectives(CPU, Activity())
    plan = ShardPlan(rows, QUERY_BLOCK, collectives.world)
    labels = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(1))
    centres = torch.randn(classes, size, generator=torch.Generator().manual_seed(2))
    before = psutil.Process().memory_info().rss
    mine = torch.empty(len(plan.rows_of(collectives.rank)), size)
    for block in plan.blocks_of(collectives.rank):
        held = plan.rows_in(block)
        at = held.start - plan.rows_of(collectives.rank).start
        noise = torch.randn(len(held), size, generator=torch.Generator().manual_seed(9 + block))
        mine[at : at + len(held)] = noise + 0.7 * centres[labels[held.start : held.stop]]
    started, cpu = time.perf_counter(), time.process_time()
    values = measure_shared(
        RowExchange(collectives), SharedRows(plan, mine, labels), None, RETRIEVAL_METRICS, "cosine", CPU, 0
    )
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    unit = 1 if sys.platform == "darwin" else 1024
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before
    return Measured(
        rows, size, classes, collectives.world, max(collectives.gather(seconds)),
        sum(collectives.gather(cpu)),
        max(collectives.gather(grown)) / MEGABYTE,
        memory_needed(rows, rows, [size], collectives.world) / MEGABYTE, values,
    )  # fmt: skip


def main() -> None:
    parser = common_options(__doc__.partition("\n")[0], 1)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--classes", type=int, default=1_000)
    parser.add_argument("--worlds", default="4,1")
    options = parser.parse_args()
    rows = 6_000 if options.quick else options.rows
    classes = min(options.classes, rows // 20)
    worlds = [int(world) for world in options.worlds.split(",")]
    found = [on_ranks(world, retrieve, rows, options.size, classes) for world in worlds]
    table = Table(title=f"{rows:,} x {options.size}, {classes:,} classes", title_justify="left")
    for column in ("ranks", "seconds", "CPU seconds", "memory (MiB)", "announced", *RETRIEVAL_METRICS):
        table.add_column(column, justify="right")
    for one in found:
        table.add_row(
            str(one.world), f"{one.seconds:.1f}", f"{one.cpu_seconds:.1f}", f"{one.megabytes:.0f}", f"{one.announced:.0f}",
            *(f"{value:.6f}" for value in one.values.values()),
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    write_json(options.json, machine(CPU), found)
    if any(one.values != found[0].values for one in found):
        sys.exit("worlds of different sizes gave different values")
    if any(one.megabytes > one.announced for one in found):
        sys.exit("more memory was taken than is announced")


if __name__ == "__main__":
    main()
