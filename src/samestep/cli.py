"""The command line: parses, calls one function, prints. Imports torch only in commands."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.errors import PROMISE_NOT_KEPT, PeerLost, SamestepError
from samestep.runtime.environment import (
    exporting,
    has_agent,
    process_environment,
    thread_variables,
)

if TYPE_CHECKING:
    from samestep.verify import Verification

app = typer.Typer(
    name="samestep",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
config_app = typer.Typer(help="Look at a config.", no_args_is_help=True)
app.add_typer(config_app, name="config")

ConfigFile = Annotated[Path, typer.Argument(help="The run's YAML or JSON file.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Config values, as section.key=value.", metavar="KEY=VALUE"),
]
# torch.distributed.launch passes it before everything else, our own launch at the end.
LocalRank = Annotated[int | None, typer.Option("--local-rank", "--local_rank", hidden=True)]


_SECONDS_FOR_THE_CAUSE = 3.0


@contextmanager
def _guarded(launched: bool = False) -> Iterator[None]:
    """Errors as people want them: mistakes without a traceback, their own code's with it."""
    try:
        yield
    except Exception as error:
        if has_agent(process_environment()):
            from samestep.runtime.failures import record_failure

            record_failure(error)
            if isinstance(error, PeerLost):
                # The agent reports who ends first: let that be the rank that failed by itself.
                time.sleep(_SECONDS_FOR_THE_CAUSE)
        if not launched:  # else the launcher shows it, the failing rank's first
            _show(error)
        raise typer.Exit(error.exit_code if isinstance(error, SamestepError) else 1) from None


def _show(error: Exception) -> None:
    if isinstance(error, SamestepError):
        typer.echo(f"samestep: {error}", err=True)
    else:
        traceback.print_exception(error)


@app.callback()
def root(context: typer.Context, local_rank: LocalRank = None) -> None:
    """Distributed PyTorch training that is the same run at any size."""
    context.obj = local_rank


@app.command()
def train(
    context: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    record: Annotated[
        Path | None, typer.Option(help="Keep the exact losses, samples and final state here.")
    ] = None,
    local_rank: LocalRank = None,
    launched: Annotated[bool, typer.Option("--launched", hidden=True)] = False,
) -> None:
    """Train on this process: alone, or as a rank of whatever launcher started it."""
    with _guarded(launched), ExitStack() as scope:
        from samestep.config import load_config

        loaded = load_config(config, overrides or [])
        threads = loaded.distributed.threads_per_rank
        scope.enter_context(exporting({} if threads == "auto" else thread_variables(threads)))
        from samestep.assemble import train_once
        from samestep.runtime.context import create_run_context
        from samestep.runtime.environment import (
            check_local_rank,
            detect_hardware,
            detect_launch,
        )

        launch = detect_launch(process_environment())
        check_local_rank(context.obj if local_rank is None else local_rank, launch)
        with create_run_context(loaded, detect_hardware(), launch) as place:
            outcome = train_once(loaded, place, record)
            if place.is_main:
                loss = "" if outcome.loss is None else f", last loss {outcome.loss:.6f}"
                typer.echo(f"{outcome.steps} steps{loss}; the run is in {loaded.run_path}")


@app.command()
def launch(
    config: ConfigFile,
    overrides: Overrides = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks to start; one per GPU.")] = None,
) -> None:
    """Start the ranks of a run on this machine."""
    with _guarded():
        from samestep.config import load_config
        from samestep.launchers.local import default_nproc, local_launch

        loaded = load_config(config, overrides or [])
        if nproc is None:
            from samestep.runtime.environment import detect_hardware

            nproc = default_nproc(loaded, detect_hardware().device_count)
        plan = local_launch(loaded, config, overrides or [], nproc)
        from samestep.runtime.agent import run_ranks

        run_ranks(plan)


@app.command()
def verify(
    config: ConfigFile,
    overrides: Overrides = None,
    worlds: Annotated[str, typer.Option(help="World sizes; the first is compared with.")] = "1,2,4",
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to run; as the config.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Also compare with this loss curve (.csv or .jsonl).")
    ] = None,
    rtol: Annotated[
        float, typer.Option(help="Tolerance for same: rounding and for --against.")
    ] = 1e-3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    report: Annotated[Path | None, typer.Option(help="Where the HTML report goes.")] = None,
) -> None:
    """Run a config at several world sizes and prove that it is the same run.

    Exits 0 only if the promise of the config's `same` level held, else 4.
    """
    with _guarded():
        from samestep.config import load_config
        from samestep.report import require_plotly, write_report
        from samestep.verify import verify as run_verify

        if report is not None:
            require_plotly()
        loaded = load_config(config, overrides or [])
        result = run_verify(
            config,
            overrides or [],
            _parse_worlds(worlds),
            steps=steps,
            against=against,
            rtol=rtol,
            tell=lambda line: typer.echo(line, err=True),
        )
        if as_json:
            typer.echo(json.dumps(result.as_json()))
        else:
            _print_verification(result)
        path = report or loaded.run_path / "verify" / "report.html"
        try:
            write_report(result, loaded.name, path)
            typer.echo(f"Report: {path}", err=True)
        except SamestepError as error:
            typer.echo(f"No report: {error}", err=True)
    if not result.kept:
        raise typer.Exit(PROMISE_NOT_KEPT)


def _parse_worlds(text: str) -> list[int]:
    from samestep.errors import LaunchError

    try:
        worlds = [int(part) for part in text.split(",")]
    except ValueError:
        raise LaunchError(f"--worlds is {text!r}: give numbers of ranks, such as 1,2,4") from None
    if min(worlds) < 1 or len(set(worlds)) != len(worlds):
        raise LaunchError(f"--worlds is {text!r}: give different numbers, each at least 1")
    return worlds


def _print_verification(result: Verification) -> None:
    from rich.console import Console
    from rich.table import Table

    from samestep.report import promise, verdict

    table = Table("ranks", "steps", "ms per step", "state", "result")
    for world in result.worlds:
        record = world.record
        words = "identical" if world.difference is None else str(world.difference)
        table.add_row(
            str(record.world),
            str(record.steps),
            f"{record.seconds_per_step * 1e3:.1f}",
            record.state_hash,
            words,
            style=None if world.kept else "red",
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    if result.against:
        off = result.against_difference
        console.print(f"Against the given curve: {'agrees' if off is None else off}")
    console.print(f"same: {result.same} promises {promise(result)}: {verdict(result)}")


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if it is not there.")],
) -> None:
    """Write a commented config.yaml and task.py to start from."""
    with _guarded():
        from samestep.starter import write_starter

        for path in write_starter(folder):
            typer.echo(f"wrote {path}")
        typer.echo(f"now: samestep train {folder / 'config.yaml'}")


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what was detected here, each fact with its reason."""
    with _guarded():
        from samestep.describe import describe_environment

        rows = describe_environment()
        if as_json:
            facts = {key: {"value": value, "reason": reason} for key, value, reason in rows}
            typer.echo(json.dumps(facts))
        else:
            _print_rows(("fact", "value", "reason"), rows)


@config_app.command()
def show(
    config: ConfigFile,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the resolved config with the origin of each value."""
    with _guarded():
        from samestep.describe import describe_config

        rows = describe_config(config, overrides or [])
        if as_json:
            values = {
                key: {"value": value, "origin": origin, "reason": reason}
                for key, value, origin, reason in rows
            }
            typer.echo(json.dumps(values))
        else:
            _print_rows(("key", "value", "origin", "reason"), rows)


@config_app.command()
def check(config: ConfigFile, overrides: Overrides = None) -> None:
    """Say everything that is wrong with a config; exits 0 if nothing is."""
    with _guarded():
        from samestep.config import load_config

        load_config(config, overrides or [])
        typer.echo(f"{config} is a valid config")


def _print_rows(header: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*header)
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main() -> None:
    app()
