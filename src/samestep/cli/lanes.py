"""The command that measures what lanes cost: lanes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import (
    MODELS,
    AsJson,
    ConfigFile,
    Launched,
    LocalRank,
    Overrides,
    app,
    guarded,
    plain,
)
from samestep.cli.ranks import as_rank
from samestep.distributed.deferred_signals import DeferredSignals
from samestep.environment.launch import detect_launch
from samestep.environment.variables import process_environment

if TYPE_CHECKING:
    from samestep.config import Config
    from samestep.lane_tuning.choices import Comparison
    from samestep.lane_tuning.result import LaneCosts, Measured

_BAR = 10
"""Characters of the longest bar in the table."""

Lanes = Annotated[
    str, typer.Option(help="Numbers of lanes; 1,2,4,8,16 and the config's own, if not given.")
]
Parallel = Annotated[
    str,
    typer.Option(help="On GPUs: lanes side by side, such as 1,4,8; as configured, if not given."),
]
Worlds = Annotated[
    str, typer.Option(help="Numbers of ranks to start on this machine, such as 1,2.")
]
Rounds = Annotated[int, typer.Option(min=1, help="Turns of each choice.")]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Timed steps of a turn; about a second's, if not given.")
]
Report = Annotated[Path | None, typer.Option(help="Also write an HTML page with a plot here.")]
# How ranks that this command has started hand over what they measured.
Result = Annotated[Path | None, typer.Option(hidden=True)]


@app.command("lanes", rich_help_panel=MODELS)
def lanes(
    context: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    lanes: Lanes = "",
    parallel: Parallel = "",
    worlds: Worlds = "",
    rounds: Rounds = 5,
    steps: Steps = None,
    as_json: AsJson = False,
    report: Report = None,
    result: Result = None,
    local_rank: LocalRank = None,
    launched: Launched = False,
) -> None:
    """Measure what lanes cost on this machine, and recommend how many.

    Trains for some seconds with each number of lanes, alone or as a rank of any launcher; saves
    nothing.
    """
    with guarded(launched), DeferredSignals():
        from samestep.config import load_config
        from samestep.lane_tuning.choices import Comparison, lanes_to_compare, parse_counts

        wanted = parse_counts(lanes, "--lanes") if lanes else ()
        widths = parse_counts(parallel, "--parallel") if parallel else ()
        sizes = parse_counts(worlds, "--worlds") if worlds else ()
        loaded = load_config(config, overrides or [])
        _refuse_other_page(report)

        def compared(worlds: Sequence[int]) -> Comparison:
            return Comparison(lanes_to_compare(loaded, wanted, worlds), widths, rounds, steps)

        if sizes:
            measured = _on_ranks(loaded, config, overrides or [], compared(sizes), sizes)
        else:
            compared([1])  # refuses most mistakes before torch is imported
            with as_rank(loaded, context, local_rank, needs_lanes=False) as place:
                from samestep.lane_tuning.measure import measure_lanes

                measured = measure_lanes(loaded, place, compared([place.world]))
            if not place.is_main:
                return
        _hand_over(measured, loaded, as_json, report, result)


def _refuse_other_page(report: Path | None) -> None:
    from samestep.ui.page import refuse_other_file

    if report is not None:
        refuse_other_file(report)


def _on_ranks(
    config: Config,
    file: Path,
    overrides: Sequence[str],
    compared: Comparison,
    worlds: Sequence[int],
) -> list[Measured]:
    from samestep.lane_tuning.choices import refuse_fixed_world
    from samestep.lane_tuning.worlds import measure_worlds
    from samestep.launch.commands.rank_command import RankCommand

    refuse_fixed_world(config, detect_launch(process_environment()).world)
    ranks = RankCommand(config, file, tuple(overrides))
    return measure_worlds(ranks, compared, worlds, lambda line: typer.echo(line, err=True))


def _hand_over(
    measured: Sequence[Measured],
    config: Config,
    as_json: bool,
    report: Path | None,
    result: Path | None,
) -> None:
    """Show what was measured; or write it, for the process that started this one."""
    from samestep.lane_tuning.result import LaneCosts
    from samestep.lane_tuning.worlds import write_measured

    if result is not None:
        write_measured(measured, result)
        return
    plan = config.batch_plan(1)
    costs = LaneCosts(plan.global_batch, plan.lane_count, measured)
    if as_json:
        typer.echo(json.dumps(costs.as_json()))
    else:
        _print_costs(costs)
    if report is not None:
        from samestep.lane_tuning.report import write_html
        from samestep.train.run_facts import config_fact

        facts = {**config_fact(config), "device": costs.device}
        write_html(costs, f"{config.name}: what lanes cost", report, facts)
        typer.echo(f"Page: {report}", err=True)


def _print_costs(costs: LaneCosts) -> None:
    from rich.console import Console
    from rich.table import Table

    from samestep.lane_tuning.report import conclusion, heading, remarks, rows

    header, body = rows(costs)
    table = Table(title=plain(heading(costs)), title_justify="left")
    for name in (*header, ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    highest = max(costs.cost(one) or 0.0 for one in costs.measured)
    best = costs.recommend()
    for one, cells in zip(costs.measured, body, strict=True):
        cost = costs.cost(one)
        bar = "left out" if cost is None else "█" * round(_BAR * cost / highest)
        chosen = (one.lanes, one.parallel) == (best.lanes, best.parallel)
        table.add_row(*cells, bar, style="bold green" if chosen else None)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for line in remarks(costs):
        console.print(plain(line), style="dim", highlight=False)
    console.print(plain(conclusion(costs)), highlight=False)
