"""Shared by the commands of `samestep bench`: options, starting ranks, and showing results."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from samestep.cli.app import (
    STARTING,
    AsJson,
    Commands,
    Launched,
    LocalRank,
    Overrides,
    app,
    guarded,
    plain,
    print_rows,
    refuse_outputs,
    reporting,
    usable,
)
from samestep.cli.ranks import as_rank
from samestep.distributed.signals import DeferredSignals
from samestep.environment.launch import LaunchMethod, detect_launch
from samestep.environment.variables import process_environment

if TYPE_CHECKING:
    from samestep.bench.document import Document
    from samestep.bench.presentation import Presentation
    from samestep.config import Config
    from samestep.distributed.context import RunContext
    from samestep.launch.run.worlds import Machines, World

bench_app = typer.Typer(
    cls=Commands, help="Measure machines, the links between them, and trainings on them.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench", rich_help_panel=STARTING)


Worlds = Annotated[str, typer.Option(help="World sizes to start, such as 2,4.")]
ViaOption = Annotated[LaunchMethod, typer.Option(help="Launcher of the ranks of --worlds.")]
Nodes = Annotated[int, typer.Option(min=1, help="The most nodes of a Slurm job.")]
Hosts = Annotated[str, typer.Option(metavar="a,b", help="For mpirun and ssh: the machines.")]
Rounds = Annotated[int | None, typer.Option(min=3, help="Rounds per variant; fewer with --quick.")]
Quick = Annotated[bool, typer.Option("--quick", help="A first look: fewer rounds and sizes.")]
Output = Annotated[Path | None, typer.Option(help="Also write the results, as JSON, here.")]
Page = Annotated[Path | None, typer.Option("--report", help="Also write an HTML page here.")]
TrainingConfig = Annotated[
    Path | None,
    typer.Argument(callback=usable, help="A training's config; one that is built in, if not given.", metavar="CONFIG"),
]
Result = Annotated[Path | None, typer.Option(hidden=True)]
"""How ranks that this command has started hand over what they measured."""


@dataclass(frozen=True)
class Start:
    """The ranks that a command starts, one number of them after the other."""

    worlds: Sequence[World]
    """Empty if it is a rank itself."""
    machines: Machines

    @classmethod
    def parse(cls, worlds: str, via: LaunchMethod, nodes: int, hosts: str) -> Start:
        """Parse the command line.

        Raises:
            LaunchError: if an option is another launcher's.
        """
        from samestep.errors import LaunchError
        from samestep.launch.run.worlds import Machines, parse_counts, parse_worlds

        if not worlds and via != "torchrun":
            raise LaunchError(f"--via {via} starts ranks: say how many, such as --worlds 1,2")
        if nodes > 1 and via != "slurm":
            raise LaunchError("--nodes is for Slurm jobs: add --via slurm")
        if hosts and via not in ("mpirun", "ssh"):
            raise LaunchError("--hosts is for mpirun and ssh: add --via mpirun or --via ssh")
        counts = parse_counts(worlds, "--worlds") if worlds else ()
        sizes = parse_worlds(",".join(map(str, counts)), via) if counts else ()
        return cls(sizes, Machines.parse(nodes, hosts))


@dataclass(frozen=True)
class BenchArguments:
    """The part of a command line that all measurements have."""

    file: Path | None
    """The config's; None for a training that is built in."""
    overrides: list[str]
    start: Start
    quick: bool

    def load(self, built_in: Callable[[], Config]) -> Config:
        """Return the config of what is measured."""
        from samestep.config import load_config

        return built_in() if self.file is None else load_config(self.file, self.overrides)


@dataclass(frozen=True)
class Measurement:
    """A measurement on ranks that the command starts, or as a rank itself."""

    config: Config
    options: Sequence[str]
    """Further options for the command of the ranks that it starts."""
    measure: Callable[[RunContext], Document]
    """Called on each rank."""
    overrides: Sequence[str] = ()
    """Further overrides for the ranks that it starts, besides those that were typed."""


def _all_take(
    context: typer.Context,
    config: TrainingConfig = None,
    overrides: Overrides = None,
    worlds: Worlds = "",
    via: ViaOption = "torchrun",
    nodes: Nodes = 1,
    hosts: Hosts = "",
    quick: Quick = False,
    as_json: AsJson = False,
    output: Output = None,
    report: Page = None,
    result: Result = None,
    local_rank: LocalRank = None,
    launched: Launched = False,
) -> None:
    """The parameters of every measurement."""


def measuring(command: Callable[..., Measurement]) -> Callable[..., Measurement]:
    """Add a command that measures to `samestep bench`, with the options that all of them have."""
    name = command.__name__
    own = list(inspect.signature(command).parameters.values())[1:]
    shared = list(inspect.signature(_all_take).parameters.values())
    hints = get_type_hints(command, include_extras=True) | get_type_hints(_all_take, include_extras=True)
    parameters = [
        one.replace(annotation=hints[one.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for one in (*shared[:3], *own, *shared[3:])
    ]

    def run(**given: Any) -> None:
        with guarded(given["launched"]), DeferredSignals():
            start = Start.parse(given["worlds"], given["via"], given["nodes"], given["hosts"])
            refuse_outputs(given["report"], result=given["output"])
            arguments = BenchArguments(given["config"], given["overrides"] or [], start, given["quick"])
            wanted = command(arguments, **{one.name: given[one.name] for one in own})
            if start.worlds:
                found = _on_worlds(name, wanted, arguments)
            else:
                context, local_rank = given["context"], given["local_rank"]
                with as_rank(wanted.config, context, local_rank, needs_lanes=False) as place:
                    found = wanted.measure(place)
                if not place.is_main:
                    return
            _hand_over(found, given["as_json"], given["output"], given["report"], given["result"])

    run.__name__, run.__doc__ = name, inspect.getdoc(command)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    bench_app.command(name)(run)
    return command


def _on_worlds(name: str, wanted: Measurement, arguments: BenchArguments) -> Document:
    """Start ranks, for each number of them, and read what they measured."""
    from samestep.bench.kinds import joined
    from samestep.bench.worlds import BenchCommand, measure_worlds
    from samestep.errors import PlanError

    if detect_launch(process_environment()).world > 1:
        raise PlanError("--worlds starts ranks, and this is one of several already: leave it out, or start one process")
    overrides = (*arguments.overrides, *wanted.overrides)
    command = BenchCommand(f"bench {name}", wanted.config, arguments.file, overrides, tuple(wanted.options))
    with reporting() as report:
        found = measure_worlds(command, arguments.start.worlds, report, arguments.start.machines)
    return joined(found)


def _hand_over(found: Document, as_json: bool, output: Path | None, report: Path | None, result: Path | None) -> None:
    """Show what was measured; or write it, for the process that started this one."""
    from samestep.bench.kinds import present
    from samestep.bench.presentation import write_html

    if result is not None:
        found.write(result)
        return
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        print_presentation(present(found))
    if output is not None:
        found.write(output)
        typer.echo(f"Results: {output}", err=True)
    if report is not None:
        write_html(found, present(found), report)
        typer.echo(f"Page: {report}", err=True)


def print_presentation(shown: Presentation) -> None:
    """Print tables."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(plain(shown.heading), highlight=False)
    for table in shown.tables:
        console.print(plain(table.title), style="bold", highlight=False)
        print_rows(table.columns, table.rows)
    for verdict in shown.verdicts:
        console.print(plain(verdict), highlight=False)
