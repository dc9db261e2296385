"""The command that measures messages between ranks."""

from __future__ import annotations

from typing import Annotated

import typer

from samestep.cli.app import AsJson, Launched, LocalRank, Overrides, guarded
from samestep.cli.bench.shared import (
    ConfigOption,
    Hosts,
    Nodes,
    Output,
    Page,
    Result,
    Rounds,
    Start,
    Via,
    ViaOption,
    Worlds,
    bench_app,
    hand_over,
    on_worlds,
    refuse_files,
)
from samestep.cli.ranks import as_rank
from samestep.distributed.deferred_signals import DeferredSignals

Operations = Annotated[
    str, typer.Option(help="Such as all-reduce,broadcast; all of them, if not given.")
]
Smallest = Annotated[str, typer.Option(help="Bytes of the smallest message.", metavar="SIZE")]
Largest = Annotated[str, typer.Option(help="Bytes of the largest one: 1GB.", metavar="SIZE")]


@bench_app.command()
def comm(
    context: typer.Context,
    config: ConfigOption = None,
    overrides: Overrides = None,
    worlds: Worlds = "",
    via: ViaOption = Via.torchrun,
    nodes: Nodes = 1,
    hosts: Hosts = "",
    operations: Operations = "",
    smallest: Smallest = "1KB",
    largest: Largest = "16MB",
    rounds: Rounds = 7,
    as_json: AsJson = False,
    output: Output = None,
    report: Page = None,
    result: Result = None,
    local_rank: LocalRank = None,
    launched: Launched = False,
) -> None:
    """Measure what messages between ranks take: all-reduce, our tree sum, all-gather, broadcast, ring.

    With --worlds it starts ranks; else it is a rank of any launcher: srun samestep bench comm.
    """
    with guarded(launched), DeferredSignals():
        from samestep.bench.sizes import sizes_between
        from samestep.config import Config, load_config

        sizes = sizes_between(smallest, largest)
        start = Start.parse(worlds, via, nodes, hosts)
        refuse_files(output, report)
        loaded = (
            Config(name="bench", steps=1)
            if config is None
            else load_config(config, overrides or [])
        )
        wanted = _operations(operations)
        if start.counts:
            from samestep.bench.worlds import BenchCommand

            options = ["--operations", ",".join(wanted), "--rounds", str(rounds)]
            options += ["--smallest", smallest, "--largest", largest]
            ranks = BenchCommand(
                "bench comm", loaded, config, tuple(overrides or ()), tuple(options)
            )
            found = on_worlds(ranks, start)
        else:
            with as_rank(loaded, context, local_rank, needs_lanes=False) as place:
                from samestep.bench.comm import measure_comm

                found = measure_comm(place, wanted, sizes, rounds)
            if not place.is_main:
                return
        hand_over(found, as_json, output, report, result)


def _operations(given: str) -> list[str]:
    from samestep.bench.sizes import OPERATIONS
    from samestep.errors import PlanError

    names = [name.strip() for name in given.split(",") if name.strip()] or list(OPERATIONS)
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown:
        raise PlanError(f"--operations has {', '.join(unknown)}: there are {', '.join(OPERATIONS)}")
    return list(dict.fromkeys(names))
