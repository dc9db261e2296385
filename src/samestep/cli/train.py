"""The commands that train: train, verify."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import (
    TRAINING,
    AsJson,
    Launched,
    LocalRank,
    Overrides,
    RunFile,
    TakesScript,
    app,
    guarded,
    script_arguments,
)
from samestep.cli.ranks import as_rank, run_script_as_rank
from samestep.distributed.deferred_signals import DeferredSignals
from samestep.errors import PROMISE_NOT_KEPT, SamestepError

if TYPE_CHECKING:
    from samestep.verify.result import Verification


@app.command(rich_help_panel=TRAINING, cls=TakesScript)
def train(
    context: typer.Context,
    config: RunFile,
    overrides: Overrides = None,
    record: Annotated[
        Path | None, typer.Option(help="Write the exact losses, samples and final state here.")
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option(min=1, help="Save and stop after this step; exits 75.")
    ] = None,
    describe: Annotated[Path | None, typer.Option(hidden=True)] = None,
    local_rank: LocalRank = None,
    launched: Launched = False,
) -> None:
    """Train in this process: alone, or as a rank of any launcher."""
    with guarded(launched), DeferredSignals():
        from samestep.config import load_config
        from samestep.launch.commands.rank_command import is_script

        if is_script(config):
            from samestep.train.requests import Observation, ScriptRequest

            observation = Observation(record, stop_after)
            request = ScriptRequest(overrides or [], observation, describe)
            return run_script_as_rank(config, request, context, local_rank)
        loaded = load_config(config, overrides or [])
        with as_rank(loaded, context, local_rank) as place:
            from samestep.launch.commands.summary import more_processes_may_help
            from samestep.train.train_once import train_once

            on_gpu = place.device.type == "cuda"
            hint = more_processes_may_help(loaded, place.world, place.threads, on_gpu)
            if hint:
                place.log.main(hint)
            outcome = train_once(loaded, place, record, stop_after)
            if place.is_main:
                loss = "" if outcome.loss is None else f", last loss {outcome.loss:.6f}"
                typer.echo(f"{outcome.steps} steps{loss}; the run is in {loaded.run_path}")


@app.command(rich_help_panel=TRAINING, cls=TakesScript)
def verify(
    context: typer.Context,
    config: RunFile,
    overrides: Overrides = None,
    worlds: Annotated[
        str, typer.Option(help="World sizes, compared with the first; 4@slurm names the launcher.")
    ] = "1,2,4",
    via: Annotated[
        str, typer.Option(help="What starts them: torchrun, mpirun, slurm or ssh.")
    ] = "torchrun",
    nodes: Annotated[int, typer.Option(min=1, help="Machines of a Slurm job.")] = 1,
    hosts: Annotated[str, typer.Option(metavar="a,b", help="Machines for mpirun and ssh.")] = "",
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to run; by default the config's.")
    ] = None,
    resumed: Annotated[
        bool,
        typer.Option("--resumed", help="Also stop the run at each size and resume it at the next."),
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="Also compare with this loss curve (.csv or .jsonl).")
    ] = None,
    rtol: Annotated[
        float, typer.Option(help="Tolerance for same: rounding and for --against.")
    ] = 1e-3,
    as_json: AsJson = False,
    report: Annotated[Path | None, typer.Option(help="Where the HTML report goes.")] = None,
) -> None:
    """Run a config, or a script, at several world sizes and prove that it is the same run.

    Exits 0 only if the promise of the config's `same` level held, else 4.
    """
    with guarded():
        from samestep.launch.commands.rank_command import RankCommand
        from samestep.launch.run.target import read_target
        from samestep.ui.page import require_plotly
        from samestep.verify.verify import verify as run_verify
        from samestep.verify.worlds import Machines, parse_worlds

        if report is not None:
            require_plotly()
        changed, arguments = tuple(overrides or ()), script_arguments(context)
        loaded = read_target(config, changed, arguments)
        result = run_verify(
            RankCommand(loaded, config, changed, arguments=arguments),
            parse_worlds(worlds, via),
            machines=Machines.parse(nodes, hosts),
            steps=steps,
            resumed=resumed,
            against=against,
            rtol=rtol,
            report=lambda line: typer.echo(line, err=True),
        )
        if as_json:
            typer.echo(json.dumps(result.as_json()))
        else:
            _print_verification(result)
        _write_report(result, loaded.name, report or loaded.run_path / "verify" / "report.html")
    if not result.kept:
        raise typer.Exit(PROMISE_NOT_KEPT)


def _write_report(result: Verification, name: str, path: Path) -> None:
    from samestep.verify.report import write_report

    try:
        write_report(result, name, path)
        typer.echo(f"Report: {path}", err=True)
    except SamestepError as error:
        typer.echo(f"No report: {error}", err=True)


def _print_verification(result: Verification) -> None:
    from rich.console import Console
    from rich.table import Table

    from samestep.verify.report import promise, verdict

    table = Table("ranks", "steps", "ms per step", "state", "result")
    for world in result.worlds:
        record = world.record
        table.add_row(
            world.label,
            str(record.steps),
            f"{record.seconds_per_step * 1e3:.1f}",
            record.state_hash,
            str(world),
            style=None if world.kept else "red",
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    if result.against:
        off = result.against_difference
        console.print(f"Against the given curve: {'agrees' if off is None else off}")
    console.print(f"same: {result.same} promises {promise(result)}: {verdict(result)}")
