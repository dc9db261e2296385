"""The command that proves the promise: verify."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import (
    TRAINING,
    AsJson,
    Overrides,
    RunFile,
    TakesScript,
    app,
    command_with,
    guarded,
    plain,
    refuse_outputs,
    reporting,
    script_arguments,
)
from samestep.environment.launch import LaunchMethod
from samestep.errors import PROMISE_NOT_KEPT, SamestepError

if TYPE_CHECKING:
    from samestep.config import Config
    from samestep.verify.compare import Verification

_OFFER = "To name the first tensor that differs"
_NOT_FOUND = (
    "No tensor differed when the steps were run again and traced: what differs depends on time, on "
    "memory, or on CUDA graphs or torch.compile, which were off"
)

Worlds = Annotated[str, typer.Option(help="World sizes, compared with the first; 4@slurm names the launcher.")]
Shards = Annotated[
    str, typer.Option(metavar="none,optimizer,weights", help="Values of distributed.shard to run each size with.")
]
ViaOption = Annotated[LaunchMethod, typer.Option(help="What starts them.")]
Nodes = Annotated[int, typer.Option(min=1, help="Machines of a Slurm job.")]
Hosts = Annotated[str, typer.Option(metavar="a,b", help="Machines for mpirun and ssh.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps to run; by default the config's.")]
Resumed = Annotated[bool, typer.Option("--resumed", help="Also stop the run at each size and resume it at the next.")]
Explain = Annotated[bool, typer.Option("--explain", help="If runs differ, trace them and name the first such tensor.")]
Against = Annotated[Path | None, typer.Option(help="Also compare with this loss curve (.csv or .jsonl).")]
Rtol = Annotated[float, typer.Option(help="Tolerance for same: rounding and for --against.")]
Ddp = Annotated[bool, typer.Option("--ddp", help="Also run it as plain DistributedDataParallel, and show both.")]
Report = Annotated[Path | None, typer.Option(help="Where the HTML report goes.")]
Picture = Annotated[Path | None, typer.Option(help="Draw the losses under the verdict: .png, .svg or .pdf.")]


@app.command(rich_help_panel=TRAINING, cls=TakesScript)
def verify(
    context: typer.Context,
    config: RunFile,
    overrides: Overrides = None,
    worlds: Worlds = "1,2,4",
    shards: Shards = "",
    via: ViaOption = "torchrun",
    nodes: Nodes = 1,
    hosts: Hosts = "",
    steps: Steps = None,
    resumed: Resumed = False,
    explain: Explain = False,
    against: Against = None,
    rtol: Rtol = 1e-3,
    as_json: AsJson = False,
    ddp: Ddp = False,
    report: Report = None,
    picture: Picture = None,
) -> None:
    """Run a config, or a script, at several world sizes and prove that it is the same run.

    Exits 0 only if the promise of the config's `same` level held, else 4.

    Example: samestep verify config.yaml --worlds 1,2,4
    """
    with guarded():
        from samestep.launch.commands.rank_command import RankCommand
        from samestep.launch.run.target import read_target
        from samestep.launch.run.worlds import Machines, parse_worlds, with_shards
        from samestep.verify.verify import verify as run_verify

        refuse_outputs(report, picture)
        changed, arguments = tuple(overrides or ()), script_arguments(context)
        loaded = read_target(config, changed, arguments)
        sizes, machines = with_shards(parse_worlds(worlds, via), shards), Machines.parse(nodes, hosts)
        with reporting() as report_line:
            result = run_verify(
                RankCommand(loaded, config, changed, arguments=arguments), sizes, machines=machines, steps=steps,
                resumed=resumed, explained=explain, against=against, rtol=rtol, report=report_line,
            )  # fmt: skip
            plain_ddp = None
            if ddp:
                changed += ("same=samples", f"run_dir={loaded.run_path / 'verify' / 'ddp'}")
                target = RankCommand(read_target(config, changed, arguments), config, changed, arguments=arguments)
                plain_ddp = run_verify(target, sizes, machines=machines, steps=steps, report=report_line)
        _print(result, as_json)
        if result.runs_differ and result.suspect is None:
            again = command_with(context, "--explain")
            typer.echo(_NOT_FOUND if explain else f"{_OFFER}: {again}", err=True)
        _keep_result(result, loaded)
        _write_report(result, loaded, report, draws_lanes=not shards, ddp=plain_ddp)
        _draw_picture(result, loaded, picture)
    if not result.kept:
        raise typer.Exit(PROMISE_NOT_KEPT)


def _print(result: Verification, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result.as_json()))
    else:
        _print_verification(result)


def _keep_result(result: Verification, config: Config) -> None:
    """Write what `samestep ui` lists among its proofs."""
    from samestep.checkpoint.files import write_whole
    from samestep.cli.ui.folders import VERIFICATION

    document = {"name": config.name, "time": time.time(), **result.as_json()}
    try:
        write_whole(config.run_path / VERIFICATION, json.dumps(document))
    except OSError as error:
        typer.echo(f"samestep: the result was not written: {error}", err=True)


def _draw_picture(result: Verification, config: Config, picture: Path | None) -> None:
    from samestep.verify.report import write_picture

    if picture is None:
        return
    try:
        write_picture(result, config.name, picture)
        typer.echo(f"Picture: {picture}", err=True)
    except SamestepError as error:
        typer.echo(f"No picture: {error}", err=True)


def _write_report(
    result: Verification, config: Config, report: Path | None, draws_lanes: bool, ddp: Verification | None
) -> None:
    from samestep.report.run_facts import config_fact, run_facts
    from samestep.verify.report import write_report

    folder = config.run_path / "verify"
    path = report or folder / "report.html"
    # Every world has one of these, with its own directory and number of ranks in it.
    run = min(folder.glob("world-*"), default=folder)
    facts = {**run_facts(run), **config_fact(config)}
    facts.pop("ranks", None)
    try:
        lanes = config.lane_count(1) if draws_lanes and _deals_evenly(config) else None
        write_report(result, config.name, path, facts, lanes, ddp)
        typer.echo(f"Report: {path}", err=True)
    except SamestepError as error:
        typer.echo(f"No report: {error}", err=True)


def _deals_evenly(config: Config) -> bool:
    """Return whether every rank has consecutive lanes, as many as the others."""
    distributed = config.distributed
    return not (config.batch_per_rank or distributed.lane_weights or distributed.shard == "weights")


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
            plain(world),
            style=None if world.kept else "red",
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    if result.against:
        off = result.against_difference
        console.print(plain(f"Against the given curve: {'agrees' if off is None else off}"))
    if result.suspect is not None:
        console.print(plain(result.suspect), style="red", highlight=False)
    console.print(f"Promise {verdict(result)} (same: {result.same}): {promise(result)}")
