"""The command that makes one report of results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import AsJson, Force, guarded, print_rows, refuse_outputs, usable
from samestep.cli.bench.shared import bench_app
from samestep.errors import SLOWER
from samestep.parsing.limits import visible

if TYPE_CHECKING:
    from samestep.bench.report.against import Comparison
    from samestep.bench.report.report import Report
    from samestep.bench.report.results import Result


Results = Annotated[
    list[Path],
    typer.Argument(callback=usable, help="Results of samestep bench, or folders of them.", metavar="RESULT..."),
]
Page = Annotated[Path | None, typer.Option("--report", callback=usable, help="Where the HTML page goes.")]
Csv = Annotated[Path | None, typer.Option(callback=usable, help="Where the rows go: one FILE.csv, or a folder.")]
Picture = Annotated[Path | None, typer.Option(callback=usable, help="Where the plots go, in .png, .svg or .pdf.")]
Against = Annotated[
    list[Path] | None,
    typer.Option(
        help="Earlier results, or a folder of them, to compare with; may be repeated. Exits 9 if "
        "something is significantly slower."
    ),
]
Tolerance = Annotated[float, typer.Option(min=0.0, max=1.0, help="A change by less than this share is none.")]


@bench_app.command()
def report(
    results: Results,
    page: Page = None,
    csv: Csv = None,
    picture: Picture = None,
    against: Against = None,
    tolerance: Tolerance = 0.05,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Join results of any machines and worlds into one page, and judge every target by them.

    Example: samestep bench report results --report bench.html
    """
    with guarded():
        from samestep.bench.report.csv_files import refuse_csv
        from samestep.bench.report.report import make_report, write_report
        from samestep.bench.report.results import read_results

        refuse_outputs(page, picture, force=force)
        if csv is not None:
            refuse_csv(csv, force)
        now = read_results(results)
        made = make_report(now)
        compared = _compared(now, usable(against or []), tolerance)
        if as_json:
            more = {} if compared is None else {"against": compared.as_json()}
            typer.echo(json.dumps({**made.as_json(), **more}))
        else:
            _print(made, compared)
        _write_tables_and_plots(made, csv, picture, force)
        if page is not None:
            write_report(made, page, compared, force)
            typer.echo(f"Page: {page}", err=True)
    if compared is not None and compared.worse:
        raise typer.Exit(SLOWER)


def _compared(now: Sequence[Result], against: list[Path], tolerance: float) -> Comparison | None:
    from samestep.bench.report.against import compare
    from samestep.bench.report.results import read_results
    from samestep.errors import PlanError

    if not against:
        return None
    found = compare(now, read_results(against), tolerance)
    if not found.changes:
        names = ", ".join(map(str, against))
        raise PlanError(f"{names} and the results have no figure in common: nothing to compare")
    return found


def _print(made: Report, compared: Comparison | None) -> None:
    from samestep.bench.report.against import COLUMNS
    from samestep.bench.report.report import TARGET_COLUMNS

    print_rows(TARGET_COLUMNS, [tuple(row) for row in made.target_cells()])
    typer.echo(f"{made.summary}.")
    if compared is None:
        return
    if compared.changed:
        rows = [change.cells() for change in compared.changed]
        print_rows(COLUMNS, [tuple(row) for row in rows])
    typer.echo(f"{compared.summary}.")
    for caution in compared.cautions:
        typer.echo(f"caution: {visible(caution)}")


def _write_tables_and_plots(made: Report, csv: Path | None, picture: Path | None, force: bool) -> None:
    from samestep.bench.report.csv_files import write_csv
    from samestep.report.picture import write_panels

    if csv is not None:
        write_csv(made, csv)
        typer.echo(f"Rows: {csv}", err=True)
    if picture is not None:
        write_panels("What these machines can do", made.panels, picture, force)
        typer.echo(f"Plots: {picture}", err=True)
