"""Times messages between ranks: collectives of many sizes, interleaved, on the ranks that are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from samestep.bench.document import Document, machine_facts
from samestep.bench.sizes import TREE_SUM
from samestep.bench.statistics import spread_of
from samestep.distributed.collectives import TorchCollectives
from samestep.distributed.context import RunContext
from samestep.distributed.timed_calls import OPERATIONS, Call, Operation, seconds_of_slowest
from samestep.errors import PlanError
from samestep.reduce.exchange import create_exchange
from samestep.report.format import format_bytes
from samestep.tracking.progress import CountedProgress

KIND = "comm"
_SECONDS_OF_A_TURN = 0.05
"""Short messages are sent so often that a turn takes about this long."""
_MOST_TIMES = 200


def _tree_sum(collectives: TorchCollectives, tensor: Tensor) -> Call:
    """One lane a rank, added in the tree's order: what `same: bits` sends."""
    blocks = [[(rank, 1)] for rank in range(collectives.world)]
    exchange = create_exchange(blocks, collectives, tensor.numel(), tensor)

    def call() -> None:
        for pending in exchange.start():
            pending.wait()

    return call


_ALL: Mapping[str, Operation] = {**OPERATIONS, TREE_SUM: Operation(_tree_sum, OPERATIONS["all-reduce"].share)}


def measure_comm(
    context: RunContext, operations: Sequence[str], sizes: Sequence[int], rounds: int, longest: float = 1.0
) -> Document:
    """Time every operation with every size, in interleaved rounds; every rank calls this and gets the same.

    Args:
        operations: Names of `bench.sizes.OPERATIONS`.
        longest: Seconds; an operation that takes longer is not tried with larger messages.

    Raises:
        PlanError: if there is one rank only.
    """
    collectives = context.collectives
    if not isinstance(collectives, TorchCollectives):
        raise PlanError("there is one rank only, and nobody to send to: give --worlds 2,4, or start several ranks")
    rows: list[dict[str, Any]] = []
    trying = list(operations)
    with CountedProgress("turn", len(sizes), context.log, context.is_main) as progress:
        for size in sizes:
            progress.begin(format_bytes(size))
            taken = _take_turns(collectives, trying, size, rounds)
            rows += [_row(collectives, name, size, seconds) for name, seconds in taken.items()]
            trying = [name for name in trying if min(taken[name]) <= longest]
            progress.add()
    facts = machine_facts(str(context.device), context.hosts)
    return Document(KIND, facts, rows)


def _take_turns(
    collectives: TorchCollectives, operations: Sequence[str], size: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of a message by operation, in each round; which one is first rotates."""
    # Written to: pages that were only allocated would be mapped while the clock runs.
    tensor = torch.zeros(size // 4, device=collectives.wire(collectives.device)).fill_(0.0)
    calls = {name: _ALL[name].prepare(collectives, tensor) for name in operations}
    times = {}
    for name, call in calls.items():
        seconds_of_slowest(collectives, call, 1)  # opens connections
        once = seconds_of_slowest(collectives, call, 1)
        times[name] = max(1, min(_MOST_TIMES, int(_SECONDS_OF_A_TURN / once)))
    taken: dict[str, list[float]] = {name: [] for name in operations}
    names = list(operations)
    for number in range(rounds):
        first = number % max(1, len(names))
        for name in (*names[first:], *names[:first]):
            taken[name].append(seconds_of_slowest(collectives, calls[name], times[name]))
    return taken


def _row(collectives: TorchCollectives, operation: str, size: int, seconds: Sequence[float]) -> dict[str, Any]:
    spread, world = spread_of(seconds), collectives.world
    return {
        "operation": operation,
        "backend": collectives.backend,
        "world": world,
        "bytes": size,
        "seconds": list(seconds),  # of a message in each round, on the slowest rank
        **asdict(spread),
        # In a second, what each rank sends at least.
        "bus_bytes": _ALL[operation].share(world) * size / spread.median,
    }
