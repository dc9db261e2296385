"""The command that measures what a training's memory consists of."""

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
from samestep.environment.variables import export

if TYPE_CHECKING:
    from samestep.bench.document import Document
    from samestep.distributed.context import RunContext

_STEPS, _QUICK_STEPS = 2000, 200
_NO_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
"""torch remembers the last 2,000 collectives: memory that grows until then, and is no leak."""

LanesPerRank = Annotated[
    str, typer.Option(help="Numbers of lanes of a rank; 1,2,4,8 (quick: 1,4), if not given.")
]
Steps = Annotated[
    int | None,
    typer.Option(min=0, help="Of the leak test: 2000 (quick: 200), if not given; 0 for none."),
]


@bench_app.command()
def memory(
    context: typer.Context,
    config: TrainingConfig = None,
    overrides: Overrides = None,
    worlds: Worlds = "",
    via: ViaOption = Via.torchrun,
    nodes: Nodes = 1,
    hosts: Hosts = "",
    lanes_per_rank: LanesPerRank = "",
    steps: Steps = None,
    quick: Quick = False,
    as_json: AsJson = False,
    output: Output = None,
    report: Page = None,
    result: Result = None,
    local_rank: LocalRank = None,
    launched: Launched = False,
) -> None:
    """Measure what memory consists of, what lanes cost, and whether it leaks; predicted beside it.

    With --worlds it starts ranks; else it is a process alone, or a rank of any launcher.
    """
    with guarded(launched), DeferredSignals():
        from samestep.launch.run.worlds import parse_counts

        lanes_per_rank = lanes_per_rank or ("1,4" if quick else "1,2,4,8")
        lanes = parse_counts(lanes_per_rank, "--lanes-per-rank")
        leak_steps = (_QUICK_STEPS if quick else _STEPS) if steps is None else steps
        start = Start.parse(worlds, via, nodes, hosts)
        refuse_files(output, report)
        loaded = load_training(config, overrides or [])
        export(_NO_FLIGHT_RECORDER)

        def measure(place: RunContext) -> Document:
            from samestep.bench.memory import MemoryPlan, measure_memory

            return measure_memory(loaded, place, MemoryPlan(lanes, leak_steps))

        options = ["--lanes-per-rank", lanes_per_rank, "--steps", str(leak_steps)]
        found = measure_training(
            "memory", loaded, config, overrides or [], options, start, context, local_rank, measure
        )
        if found is not None:
            hand_over(found, as_json, output, report, result)
