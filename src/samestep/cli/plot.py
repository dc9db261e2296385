"""The command that draws the curves of runs: plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import RUNS, AsJson, Force, app, guarded, print_rows, usable
from samestep.errors import MissingExtraError

if TYPE_CHECKING:
    from samestep.report.curves.history import History


def _all_usable(paths: list[Path]) -> list[Path]:
    for path in paths:
        usable(path)
    return paths


Runs = Annotated[
    list[Path],
    typer.Argument(callback=_all_usable, help="Runs' directories.", metavar="RUN..."),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metric", metavar="NAME", help="Draw only this; may be repeated, takes * and ?."
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(callback=usable, help="Where the picture goes: .png, .svg or .pdf."),
]
Report = Annotated[Path | None, typer.Option(callback=usable, help="Where the HTML page goes.")]


@app.command(rich_help_panel=RUNS)
def plot(
    runs: Runs,
    metric: Metrics = None,
    output: Output = None,
    report: Report = None,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Show the curves of one or several runs, also of those that still train.

    A table, and with --output and --report a picture and a page.
    """
    with guarded():
        from samestep.report.curves.choice import choose
        from samestep.report.curves.history import read_histories
        from samestep.report.curves.summary import as_json as document
        from samestep.report.curves.summary import table
        from samestep.report.page import refuse_other_file
        from samestep.report.picture import refuse_picture

        if output is not None:
            refuse_picture(output, force)
        if report is not None and not force:
            refuse_other_file(report, "--force replaces it, or name another file")
        histories = read_histories(runs)
        metrics = choose(histories, metric or [])
        _remark(histories)
        if as_json:
            typer.echo(json.dumps(document(histories, metrics), allow_nan=False))
        else:
            header, rows = table(histories, metrics)
            print_rows(header, [tuple(row) for row in rows])
        _draw(histories, metrics, output, report, force)


def _remark(histories: Sequence[History]) -> None:
    for history in histories:
        if history.unread:
            typer.echo(f"{history.run}: {history.unread} line(s) hold no row of numbers", err=True)
        if not history.metrics:
            typer.echo(f"{history.run}: no numbers yet", err=True)


def _draw(
    histories: Sequence[History],
    metrics: Sequence[str],
    output: Path | None,
    report: Path | None,
    force: bool,
) -> None:
    from samestep.report.curves.choice import MOST_PANELS
    from samestep.report.curves.page import write_html
    from samestep.report.curves.panels import panels_of
    from samestep.report.picture import write_panels

    if output is None and report is None:
        return
    panels = panels_of(histories, metrics)
    if len(panels) > MOST_PANELS:
        left = len(panels) - MOST_PANELS
        typer.echo(f"{left} metrics are not drawn: choose others with --metric", err=True)
    if output is not None:
        try:
            write_panels(
                ", ".join(one.label for one in histories), panels[:MOST_PANELS], output, force
            )
            typer.echo(f"Plot: {output}", err=True)
        except MissingExtraError as error:
            typer.echo(f"No plot: {error}", err=True)
    if report is not None:
        write_html(histories, metrics, panels[:MOST_PANELS], report, force)
        typer.echo(f"Page: {report}", err=True)
