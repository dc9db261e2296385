"""`samestep demo`: one training at several sizes, killed and resumed, beside plain DDP."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.cli.app import STARTING, AsJson, app, guarded
from samestep.errors import PROMISE_NOT_KEPT

if TYPE_CHECKING:
    from rich.table import Table

    from samestep.verify.demo.runs import Demo, DemoRun


@app.command(rich_help_panel=STARTING)
def demo(
    folder: Annotated[Path, typer.Argument(help="A new folder for the project and its runs.", metavar="FOLDER")] = Path(
        "samestep-demo"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier demo in that folder.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the promise in half a minute: one training on 1, 2 and 4 ranks, killed and resumed, beside plain DDP.

    Trains the project that `samestep init` writes. Exits 0 if all of samestep's runs are identical, else 4.

    Example: samestep demo
    """
    with guarded():
        from samestep.checkpoint.ownership import claim_empty
        from samestep.cli.starter import write_starter

        claim_empty(folder, "demo", force)
        write_starter(folder)
        began = time.monotonic()
        with _showing(as_json) as start:
            from samestep.verify.demo.page import write_demo_page
            from samestep.verify.demo.runs import plan_demo, run_demo

            planned = plan_demo(folder / "config.yaml")
            run_demo(planned, start(planned))
        page = folder / "demo.html"
        write_demo_page(planned, page)
        _print_result(planned, page, time.monotonic() - began, as_json)
    if not planned.is_same:
        raise typer.Exit(PROMISE_NOT_KEPT)


@contextmanager
def _showing(as_json: bool) -> Iterator[Callable[[Demo], Callable[[], None]]]:
    """Yield what begins to show a demo: a table that moves on a terminal, else a line per run."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    if not sys.stderr.isatty():
        yield lambda demo: _Lines(demo, as_json)
        return
    # Without a thread, which forks of this process would not have: it is refreshed by `update`.
    with Live(console=console, auto_refresh=False) as live:
        yield lambda demo: lambda: live.update(_table(demo), refresh=True)


class _Lines:
    """Prints each run that is over, where there is no terminal."""

    def __init__(self, demo: Demo, quiet: bool) -> None:
        self._demo, self._quiet, self._shown = demo, quiet, 0

    def __call__(self) -> None:
        for run in self._demo.runs[self._shown :]:
            if not run.is_over:
                return
            self._shown += 1
            if not self._quiet:
                typer.echo(f"{run.by}, {run.name}: loss {run.loss:.9f}, state {run.state[:16]}", err=True)


def _table(demo: Demo) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table("", "run", "", "loss", "final state")
    for number, run in enumerate(demo.runs):
        begins = number == 0 or run.by != demo.runs[number - 1].by
        loss = "" if run.loss is None else f"{run.loss:.6f}"
        bar = ProgressBar(total=run.total, completed=run.step, width=16)
        ends = number + 1 == len(demo.runs) or demo.runs[number + 1].by != run.by
        table.add_row(run.by if begins else "", run.name, bar, loss, _state(run, demo), end_section=ends)
    return table


def _state(run: DemoRun, demo: Demo) -> Any:
    from rich.text import Text

    if not run.is_over:
        return ""
    first = demo.of(run.by)[0]
    return Text(run.state[:16], style="green" if run.is_same(first) else "red")


def _print_result(demo: Demo, page: Path, seconds: float, as_json: bool) -> None:
    from samestep.verify.demo.runs import DDP, SAMESTEP
    from samestep.words import counted

    if as_json:
        runs = [
            {
                "by": run.by,
                "run": run.name,
                "state": run.state,
                "resumed_at": run.resumed_at,
                "seconds": round(run.seconds, 2),
                "losses": run.losses,
            }
            for run in demo.runs
        ]
        typer.echo(json.dumps({"same": demo.is_same, "seconds": round(seconds, 1), "runs": runs, "page": str(page)}))
        return
    for by in (SAMESTEP, DDP):
        typer.echo(f"{by}: {counted(len(demo.of(by)), 'run')}, {counted(demo.different(by), 'final state')}")
    if not demo.is_same:
        typer.echo("samestep's runs are NOT the same", err=True)
    typer.echo(f"Page: {page}. The project: {demo.config}, {demo.config.parent / 'task.py'}")
    typer.echo(f"Next: samestep verify {demo.config} --worlds 1,2,4")
