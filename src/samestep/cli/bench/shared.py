"""What the commands of `samestep bench` share: options, starting ranks, and showing what was found."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import STARTING, app, plain, print_rows, usable
from samestep.environment.launch import detect_launch
from samestep.environment.variables import process_environment

if TYPE_CHECKING:
    from samestep.bench.document import Document
    from samestep.bench.presentation import Presentation
    from samestep.bench.worlds import BenchCommand
    from samestep.launch.run.worlds import Machines

bench_app = typer.Typer(
    help="Measure machines, the links between them, and trainings on them.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench", rich_help_panel=STARTING)


class Via(str, Enum):
    """What starts the ranks of --worlds."""

    torchrun = "torchrun"
    mpirun = "mpirun"
    slurm = "slurm"
    ssh = "ssh"


Worlds = Annotated[str, typer.Option(help="Numbers of ranks to start, such as 2,4.")]
ViaOption = Annotated[
    Via, typer.Option(help="What starts the ranks of --worlds; torchrun: on this machine.")
]
Nodes = Annotated[int, typer.Option(min=1, help="The most nodes of a Slurm job.")]
Hosts = Annotated[str, typer.Option(metavar="a,b", help="For mpirun and ssh: the machines.")]
Rounds = Annotated[int, typer.Option(min=3, help="Turns of each.")]
Output = Annotated[Path | None, typer.Option(help="Also write the results, as JSON, here.")]
Page = Annotated[Path | None, typer.Option("--report", help="Also write an HTML page here.")]
ConfigOption = Annotated[
    Path | None,
    typer.Argument(
        callback=usable, help="A config, whose distributed section counts.", metavar="[CONFIG]"
    ),
]
Result = Annotated[Path | None, typer.Option(hidden=True)]
"""How ranks that this command has started hand over what they measured."""


@dataclass(frozen=True)
class Start:
    """The ranks that a command starts, one number of them after the other."""

    counts: tuple[int, ...]
    """None if it is a rank itself."""
    via: Via
    machines: Machines

    @classmethod
    def parse(cls, worlds: str, via: Via, nodes: int, hosts: str) -> Start:
        """From the command line.

        Raises:
            LaunchError: if an option is another launcher's.
        """
        from samestep.errors import LaunchError
        from samestep.launch.run.worlds import Machines, parse_counts

        if not worlds and via is not Via.torchrun:
            raise LaunchError(f"--via {via.value} starts ranks: say how many, such as --worlds 1,2")
        if nodes > 1 and via is not Via.slurm:
            raise LaunchError("--nodes is for Slurm jobs: add --via slurm")
        if hosts and via not in (Via.mpirun, Via.ssh):
            raise LaunchError("--hosts is for mpirun and ssh: add --via mpirun or --via ssh")
        counts = parse_counts(worlds, "--worlds") if worlds else ()
        return cls(counts, via, Machines.parse(nodes, hosts))

    def where(self) -> list[str]:
        """The options that say where its ranks run, for another command."""
        found = ["--via", self.via.value]
        found += ["--nodes", str(self.machines.nodes)] if self.machines.nodes > 1 else []
        return [*found, "--hosts", ",".join(self.machines.hosts)] if self.machines.hosts else found


def on_worlds(command: BenchCommand, start: Start) -> Document:
    """Start ranks, for each number of them, and read what they measured."""
    from samestep.bench.document import Document
    from samestep.bench.worlds import measure_worlds
    from samestep.errors import PlanError
    from samestep.launch.run.worlds import parse_worlds

    if detect_launch(process_environment()).world > 1:
        raise PlanError(
            "--worlds starts ranks, and this is one of several already: leave it out, or start one "
            "process"
        )
    sizes = parse_worlds(",".join(map(str, start.counts)), start.via.value)
    found = measure_worlds(command, sizes, lambda line: typer.echo(line, err=True), start.machines)
    return Document(found[0].kind, found[0].machine, [row for one in found for row in one.rows])


def refuse_files(output: Path | None, report: Path | None) -> None:
    """Refuse to replace what is no result of ours; before the work, not after it."""
    from samestep.bench.document import refuse_other_result
    from samestep.report.page import refuse_other_file

    if report is not None:
        refuse_other_file(report)
    if output is not None:
        refuse_other_result(output)


def hand_over(
    found: Document, as_json: bool, output: Path | None, report: Path | None, result: Path | None
) -> None:
    """Show what was measured; or write it, for the process that started this one."""
    from samestep.bench.kinds import present
    from samestep.bench.presentation import write_html

    if result is not None:
        found.write(result)
        return
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        print_document(found)
    if output is not None:
        found.write(output)
        typer.echo(f"Results: {output}", err=True)
    if report is not None:
        write_html(found, present(found), report)
        typer.echo(f"Page: {report}", err=True)


def print_document(found: Document) -> None:
    """As tables."""
    from samestep.bench.kinds import present

    print_presentation(present(found))


def print_presentation(shown: Presentation) -> None:
    """As tables."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(plain(shown.heading), highlight=False)
    for table in shown.tables:
        console.print(plain(table.title), style="bold", highlight=False)
        print_rows(table.columns, table.rows)
    for verdict in shown.verdicts:
        console.print(plain(verdict), highlight=False)
