"""What the commands of `samestep bench` share: options, starting ranks, and showing what was found."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import STARTING, app, print_rows, usable
from samestep.environment.launch import detect_launch
from samestep.environment.variables import process_environment

if TYPE_CHECKING:
    from samestep.bench.document import Document
    from samestep.bench.worlds import BenchCommand
    from samestep.launch.run.worlds import Machines

bench_app = typer.Typer(
    help="Measure machines, the links between them, and trainings on them.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench", rich_help_panel=STARTING)

Worlds = Annotated[
    str, typer.Option(help="Numbers of ranks to start on this machine, such as 2,4.")
]
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


def on_worlds(
    command: BenchCommand,
    worlds: Sequence[int],
    via: str = "torchrun",
    machines: Machines | None = None,
) -> Document:
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
    sizes = parse_worlds(",".join(map(str, worlds)), via)
    found = measure_worlds(command, sizes, lambda line: typer.echo(line, err=True), machines)
    return Document(found[0].kind, found[0].machine, [row for one in found for row in one.rows])


def refuse_files(output: Path | None, report: Path | None) -> None:
    """Refuse to replace what is no result of ours; before the work, not after it."""
    from samestep.bench.document import refuse_other_result
    from samestep.ui.page import refuse_other_file

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
    from rich.console import Console

    from samestep.bench.kinds import present

    shown = present(found)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(shown.heading, highlight=False)
    for table in shown.tables:
        console.print(table.title, style="bold", highlight=False, markup=False)
        print_rows(table.columns, table.rows)
    for verdict in shown.verdicts:
        console.print(verdict, highlight=False, markup=False)
