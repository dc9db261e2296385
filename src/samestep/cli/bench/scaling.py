"""The command that measures what more ranks bring."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import AsJson, Launched, LocalRank, Overrides, guarded, usable
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
    on_worlds,
    refuse_files,
)
from samestep.cli.ranks import as_rank
from samestep.distributed.deferred_signals import DeferredSignals

if TYPE_CHECKING:
    from samestep.config import Config


class Mode(str, Enum):
    """How the global batch grows with the ranks."""

    weak = "weak"
    strong = "strong"
    both = "both"


class Workload(str, Enum):
    """A built-in task."""

    mlp = "mlp"
    conv = "conv"
    transformer = "transformer"


class Size(str, Enum):
    """Of a built-in task."""

    small = "small"
    medium = "medium"
    large = "large"


ConfigArgument = Annotated[
    Path | None,
    typer.Argument(
        callback=usable,
        help="A training to measure; with --workload, only its distributed section counts.",
        metavar="[CONFIG]",
    ),
]
ModeOption = Annotated[
    Mode, typer.Option(help="weak: the batch grows with the ranks; strong: it stays.")
]
WorkloadOption = Annotated[
    Workload | None, typer.Option(help="A built-in task; mlp, if there is no config.")
]
SizeOption = Annotated[Size, typer.Option(help="Of the built-in task.")]
Lanes = Annotated[
    int | None,
    typer.Option(min=1, help="Of a rank in weak scaling, of all ranks in strong scaling."),
]
Contestants = Annotated[
    str, typer.Option(help="Of samestep,ddp,accelerate,lightning; all that are installed.")
]
Rounds = Annotated[
    int | None, typer.Option(min=3, help="Turns of each loop; 9, or 3 with --quick.")
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Fewer and shorter turns, of samestep and DDP.")
]
MostRanks = Annotated[int, typer.Option(hidden=True)]


@bench_app.command()
def scaling(
    context: typer.Context,
    config: ConfigArgument = None,
    overrides: Overrides = None,
    worlds: Worlds = "",
    mode: ModeOption = Mode.both,
    workload: WorkloadOption = None,
    size: SizeOption = Size.small,
    lanes: Lanes = None,
    contestants: Contestants = "",
    rounds: Rounds = None,
    quick: Quick = False,
    via: ViaOption = Via.torchrun,
    nodes: Nodes = 1,
    hosts: Hosts = "",
    as_json: AsJson = False,
    output: Output = None,
    report: Page = None,
    most_ranks: MostRanks = 1,
    result: Result = None,
    local_rank: LocalRank = None,
    launched: Launched = False,
) -> None:
    """Measure what more ranks bring: samestep, plain DDP and other libraries in turns, on your task or a built-in one.

    With --worlds it starts ranks; else it is a rank of any launcher: srun samestep bench scaling.
    """
    with guarded(launched), DeferredSignals():
        from samestep.bench.programs import scaling_ranks
        from samestep.bench.scaling_request import ScalingRequest, parse_contestants

        start = Start.parse(worlds, via, nodes, hosts)
        refuse_files(output, report)
        loaded = _config(config, overrides or [])
        built_in = (workload or Workload.mlp).value if workload or config is None else None
        request = ScalingRequest(
            mode.value, built_in, size.value, lanes, parse_contestants(contestants), rounds, quick,
            max(most_ranks, *start.counts, 1),
        )  # fmt: skip
        request.check(loaded)
        if start.counts:
            ranks = scaling_ranks(request, loaded, config, overrides or [])
            found = on_worlds(ranks, start)
        else:
            with as_rank(loaded, context, local_rank, needs_lanes=False) as place:
                from samestep.bench.scaling_ranks import measure_request

                found = measure_request(request, loaded, place)
            if not place.is_main:
                return
        hand_over(found, as_json, output, report, result)


def _config(file: Path | None, overrides: list[str]) -> Config:
    from samestep.config import Config, load_config

    return Config(name="bench", steps=1) if file is None else load_config(file, overrides)
