"""The commands that measure machines: bench comm."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import (
    STARTING,
    AsJson,
    Launched,
    LocalRank,
    Overrides,
    app,
    guarded,
    print_rows,
    usable,
)
from samestep.cli.ranks import as_rank
from samestep.distributed.deferred_signals import DeferredSignals
from samestep.environment.launch import detect_launch
from samestep.environment.variables import process_environment

if TYPE_CHECKING:
    from samestep.bench.document import Document
    from samestep.bench.worlds import BenchCommand

bench_app = typer.Typer(help="Measure machines and the links between them.", no_args_is_help=True)
app.add_typer(bench_app, name="bench", rich_help_panel=STARTING)

Worlds = Annotated[
    str, typer.Option(help="Numbers of ranks to start on this machine, such as 2,4.")
]
Operations = Annotated[
    str, typer.Option(help="Such as all-reduce,broadcast; all of them, if not given.")
]
Smallest = Annotated[str, typer.Option(help="Bytes of the smallest message.", metavar="SIZE")]
Largest = Annotated[str, typer.Option(help="Bytes of the largest one: 1GB.", metavar="SIZE")]
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


@bench_app.command()
def comm(
    context: typer.Context,
    config: ConfigOption = None,
    overrides: Overrides = None,
    worlds: Worlds = "",
    operations: Operations = "",
    smallest: Smallest = "1KB",
    largest: Largest = "16MB",
    rounds: Rounds = 7,
    as_json: AsJson = False,
    output: Output = None,
    report: Page = None,
    result: Result = None,
    local_rank: LocalRank = None,
    launched: Launched = False,
) -> None:
    """Measure what messages between ranks take: all-reduce, our tree sum, all-gather, broadcast, ring.

    With --worlds it starts ranks here; else it is a rank of any launcher: srun samestep bench comm.
    """
    with guarded(launched), DeferredSignals():
        from samestep.bench.sizes import sizes_between
        from samestep.config import Config, load_config
        from samestep.lane_tuning.choices import parse_counts

        sizes = sizes_between(smallest, largest)
        counts = parse_counts(worlds, "--worlds") if worlds else ()
        _refuse_files(output, report)
        loaded = (
            Config(name="bench", steps=1)
            if config is None
            else load_config(config, overrides or [])
        )
        wanted = _operations(operations)
        if counts:
            from samestep.bench.worlds import BenchCommand

            options = ["--operations", ",".join(wanted), "--rounds", str(rounds)]
            options += ["--smallest", smallest, "--largest", largest]
            ranks = BenchCommand(
                "bench comm", loaded, config, tuple(overrides or ()), tuple(options)
            )
            found = _on_worlds(ranks, counts)
        else:
            with as_rank(loaded, context, local_rank, needs_lanes=False) as place:
                from samestep.bench.comm import measure_comm

                found = measure_comm(place, wanted, sizes, rounds)
            if not place.is_main:
                return
        _hand_over(found, as_json, output, report, result)


def _operations(given: str) -> list[str]:
    from samestep.bench.sizes import OPERATIONS
    from samestep.errors import PlanError

    names = [name.strip() for name in given.split(",") if name.strip()] or list(OPERATIONS)
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown:
        raise PlanError(f"--operations has {', '.join(unknown)}: there are {', '.join(OPERATIONS)}")
    return list(dict.fromkeys(names))


def _on_worlds(command: BenchCommand, worlds: Sequence[int]) -> Document:
    from samestep.bench.document import Document
    from samestep.bench.worlds import measure_worlds
    from samestep.errors import PlanError

    if detect_launch(process_environment()).world > 1:
        raise PlanError(
            "--worlds starts ranks, and this is one of several already: leave it out, or start one "
            "process"
        )
    found = measure_worlds(command, worlds, lambda line: typer.echo(line, err=True))
    return Document(found[0].kind, found[0].machine, [row for one in found for row in one.rows])


def _refuse_files(output: Path | None, report: Path | None) -> None:
    from samestep.bench.document import refuse_other_result
    from samestep.ui.page import refuse_other_file

    if report is not None:
        refuse_other_file(report)
    if output is not None:
        refuse_other_result(output)


def _hand_over(
    found: Document, as_json: bool, output: Path | None, report: Path | None, result: Path | None
) -> None:
    """Show what was measured; or write it, for the process that started this one."""
    if result is not None:
        found.write(result)
        return
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        _print(found)
    if output is not None:
        found.write(output)
        typer.echo(f"Results: {output}", err=True)
    if report is not None:
        from samestep.bench.comm_report import write_html

        write_html(found, report)
        typer.echo(f"Page: {report}", err=True)


def _print(found: Document) -> None:
    from rich.console import Console

    from samestep.bench.comm_report import COLUMNS, LINK_COLUMNS, cells, heading, link_cells

    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(heading(found), highlight=False)
    print_rows(COLUMNS, cells(found.rows))
    print_rows(LINK_COLUMNS, link_cells(found.rows))
