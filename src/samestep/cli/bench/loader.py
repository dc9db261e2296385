"""The command that measures whether data is the bottleneck."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import AsJson, Launched, LocalRank, Overrides, guarded
from samestep.cli.bench.shared import (
    Hosts,
    Nodes,
    Output,
    Page,
    Result,
    Start,
    Via,
    ViaOption,
    Worlds,
    bench_app,
    hand_over,
    refuse_files,
)
from samestep.cli.bench.training import Quick, TrainingConfig, load_training, measure_training
from samestep.distributed.deferred_signals import DeferredSignals

if TYPE_CHECKING:
    from samestep.bench.document import Document
    from samestep.distributed.context import RunContext

Workers = Annotated[
    str, typer.Option(help="Loader processes of a rank; 0,1,2,4 (quick: 0,2), if not given.")
]
Prefetch = Annotated[
    str,
    typer.Option(help="Lane batches that each reads ahead; 2,4 (quick: 2), if not given."),
]
Turns = Annotated[
    int | None, typer.Option(min=3, help="Turns of each; 7 (quick: 3), if not given.")
]


@bench_app.command()
def loader(
    context: typer.Context,
    config: TrainingConfig = None,
    overrides: Overrides = None,
    workers: Workers = "",
    prefetch: Prefetch = "",
    worlds: Worlds = "",
    via: ViaOption = Via.torchrun,
    nodes: Nodes = 1,
    hosts: Hosts = "",
    rounds: Turns = None,
    quick: Quick = False,
    as_json: AsJson = False,
    output: Output = None,
    report: Page = None,
    result: Result = None,
    local_rank: LocalRank = None,
    launched: Launched = False,
) -> None:
    """Measure whether data is the bottleneck, and recommend loader.workers and loader.prefetch.

    With --worlds it starts ranks; else it is a process alone, or a rank of any launcher.
    """
    with guarded(launched), DeferredSignals():
        from samestep.launch.run.worlds import parse_counts

        workers = workers or ("0,2" if quick else "0,1,2,4")
        prefetch = prefetch or ("2" if quick else "2,4")
        rounds = rounds or (3 if quick else 7)
        tried = _with_none(workers)
        ahead = parse_counts(prefetch, "--prefetch")
        start = Start.parse(worlds, via, nodes, hosts)
        refuse_files(output, report)
        loaded = load_training(config, overrides or [])

        def measure(place: RunContext) -> Document:
            from samestep.bench.loader import LoaderPlan, measure_loader

            return measure_loader(loaded, place, LoaderPlan(tried, ahead, rounds))

        options = ["--workers", workers, "--prefetch", prefetch, "--rounds", str(rounds)]
        found = measure_training(
            "loader", loaded, config, overrides or [], options, start, context, local_rank, measure
        )
        if found is not None:
            hand_over(found, as_json, output, report, result)


def _with_none(text: str) -> tuple[int, ...]:
    """Numbers of workers, of which 0 is one."""
    from samestep.launch.run.worlds import parse_counts

    parts = [part.strip() for part in text.split(",")]
    some = [part for part in parts if part != "0"]
    counts = parse_counts(",".join(some), "--workers") if some else ()
    return (0, *counts) if "0" in parts else counts
