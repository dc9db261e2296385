"""What adding in the lane tree's fixed order costs, compared with the backend's all-reduce.

    python benchmarks/exchange.py [--quick] [--rounds N] [--json FILE]

First the exchange alone: one buffer, one lane per rank, against `all_reduce` of the same size,
both in preallocated memory. Then a whole step with `same: bits` against one with
`same: rounding`, where most of the exchange overlaps the backward pass. All on gloo, one
thread per rank, and measured as in overhead.py: in turns, medians of the rounds' ratios.

With more ranks than CPUs, `ms` is the time for all ranks sharing the CPUs.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from measuring import (
    Result,
    common_options,
    compare,
    machine,
    on_ranks,
    result_table,
    rounds_of,
    show,
    time_rounds,
    write_json,
)
from overhead import Place, Workload, mlp, race, vectors

from samestep.distributed.collectives import TorchCollectives
from samestep.distributed.health.activity import Activity
from samestep.reduce.exchange import Exchange, create_exchange

ROUNDS = 25
EXCHANGE_GOAL = 1.5
STEP_GOAL = 1.05
MEGABYTES = (1, 25, 100)
CPU = torch.device("cpu")
ALL_REDUCE, CONTROL, TREE = "all-reduce", "all-reduce, again", "lane tree"
TURNS = {1: 10, 25: 1, 100: 1}
"""Exchanges of each kind in a round: a small one is too short to be timed alone."""

STEP_WORKLOAD = Workload(
    "MLP 4x1024, batch 64", 64, 5, 2, lambda: mlp(5, 1024), lambda samples: vectors(samples, 1024)
)


def measure_exchange(megabytes: int, rounds: int) -> list[Result]:
    """The exchange of one buffer on this rank and the others."""
    rank, world = dist.get_rank(), dist.get_world_size()
    numel = (megabytes << 20) // 4
    blocks = [[(r, 1)] for r in range(world)]
    exchange = create_exchange(blocks, TorchCollectives(CPU, Activity()), numel, torch.empty(0))
    # Filled, since pages that were only allocated would be mapped during the measurement.
    plain, other = torch.zeros(2, numel).fill_(0.0)
    check_sum(exchange, rank, world)
    contestants = {
        ALL_REDUCE: lambda: dist.all_reduce(plain),
        CONTROL: lambda: dist.all_reduce(other),
        TREE: lambda: run_exchange(exchange),
    }
    turns = TURNS[megabytes]
    spent = time_rounds(contestants, rounds, turns, CPU)
    return compare(f"{megabytes} MB of float32", world, spent, turns, {TREE: EXCHANGE_GOAL})


def run_exchange(exchange: Exchange) -> None:
    for work in exchange.start():
        work.wait()


def check_sum(exchange: Exchange, rank: int, world: int) -> None:
    """Check that it adds; then leave zeros, which stay zero however often they are added."""
    exchange.rows.fill_(rank + 1)
    run_exchange(exchange)
    assert (exchange.total == world * (world + 1) / 2).all(), "the exchange gave a wrong sum"
    exchange.rows.zero_()


def measure_exchanges(rounds: int) -> list[Result]:
    return [result for size in MEGABYTES for result in measure_exchange(size, rounds)]


def measure_step(rounds: int) -> list[Result]:
    """A whole step of a model of 4 million parameters, on this rank and the others."""
    place = Place(dist.get_world_size(), CPU)
    spent, steps = race(STEP_WORKLOAD, place, [], ["rounding", "bits"], rounds)
    goals = {"samestep, bits": STEP_GOAL}
    return compare(STEP_WORKLOAD.name, place.world, spent, steps, goals)


def main() -> None:
    options = common_options(
        "What the lane tree costs, compared with all-reduce.", ROUNDS
    ).parse_args()
    rounds = rounds_of(options, ROUNDS)
    cpus = os.cpu_count() or 1
    exchanges: list[Result] = []
    for world in (2, 4, 8) if cpus >= 8 else (2, 4):
        exchanges += on_ranks(world, measure_exchanges, rounds)
    steps: list[Result] = []
    for world in (2, 4) if cpus >= 4 else (2,):
        steps += on_ranks(world, measure_step, rounds)
    facts = machine(CPU)
    tables = [
        result_table("The exchange alone", "ms", exchanges),
        result_table("A whole step", "ms/step", steps),
    ]
    show(tables, facts, rounds)
    write_json(options.json, facts, [*exchanges, *steps])


if __name__ == "__main__":
    main()
