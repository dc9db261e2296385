"""The command that draws runs, sweeps and embeddings: plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from samestep.cli.app import (
    RUNS,
    AsJson,
    Force,
    LocalRank,
    app,
    guarded,
    print_rows,
    refuse_outputs,
    split_overrides,
    typed_options,
    usable,
)
from samestep.cli.ranks import as_rank
from samestep.errors import MissingExtraError, PlanError

if TYPE_CHECKING:
    from samestep.models.embeddings.embedded import EmbeddedRun
    from samestep.models.embeddings.report import Picture
    from samestep.report.curves.history import History


def _embedding_option(help: str, **more: Any) -> Any:
    return typer.Option(help=help, rich_help_panel="With --embeddings", **more)


Targets = Annotated[
    list[str],
    typer.Argument(
        callback=usable,
        help="Runs' directories, or one sweep; with --embeddings also values of the run's config.",
        metavar="RUN|SWEEP|KEY=VALUE",
    ),
]


Metrics = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Draw only this; may be repeated, takes * and ?.")
]
PictureFile = Annotated[Path | None, typer.Option(callback=usable, help="Write a picture: .png, .svg or .pdf.")]
Page = Annotated[Path | None, typer.Option(callback=usable, help="Write an HTML page.")]


Axis = Literal["step", "epoch", "seconds", "samples"]
"""The horizontal axis of curves: those of `AxisName`."""


HorizontalAxis = Annotated[Axis, typer.Option("--x", help="The horizontal axis; a page lets its reader change it.")]
Smooth = Annotated[
    float, typer.Option(min=0, max=0.999, help="Draw running means: the weight of the past, such as 0.9.")
]
Embeddings = Annotated[bool, typer.Option("--embeddings", help="A run's embeddings on a page: PCA, t-SNE and UMAP.")]
Data = Annotated[str, _embedding_option("valid, train, or a name that the task's predict_data knows.")]
Reference = Annotated[str, _embedding_option("Where neighbours are sought: train, valid, a name, or none.")]
View = Annotated[str | None, _embedding_option("Which of the task's embeddings; the first if not given.")]
Maps = Annotated[str, _embedding_option("Which maps.")]
Points = Annotated[int, _embedding_option("Draw this many at most.", min=2, max=20000)]
Which = Annotated[str, _embedding_option("best, last, or the number of a step.")]
Weights = Annotated[str, _embedding_option("raw, ema, swa or average.")]

_OF_EMBEDDINGS = ("--data", "--reference", "--view", "--maps", "--points", "--which", "--weights")


@app.command(rich_help_panel=RUNS)
def plot(
    context: typer.Context,
    targets: Targets,
    metric: Metrics = None,
    picture: PictureFile = None,
    report: Page = None,
    x: HorizontalAxis = "step",
    smooth: Smooth = 0.0,
    embeddings: Embeddings = False,
    data: Data = "valid",
    reference: Reference = "train",
    view: View = None,
    maps: Maps = "pca,tsne,umap",
    points: Points = 2000,
    which: Which = "best",
    weights: Weights = "raw",
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Run the code, or use the database, that RUN or SWEEP names, also if it may not be yours."
        ),
    ] = False,
    force: Force = False,
    as_json: AsJson = False,
    local_rank: LocalRank = None,
) -> None:
    """Draw the curves of runs, a sweep's trials, or a run's embeddings; also while they run.

    Of runs it prints a table; --picture and --report draw them. Of a sweep, and of embeddings, it writes a page into
    their directory unless --report names another file. An error there is a sample whose nearest reference is of another class.

    Example: samestep plot runs/a runs/b --report curves.html
    """
    with guarded():
        from samestep.sweep.study_folder import sweep_folder

        paths, overrides = split_overrides(targets)
        if not paths:
            raise PlanError("nothing to draw: give runs' directories, or a sweep")
        if embeddings:
            if len(paths) != 1 or metric or picture is not None:
                raise PlanError("--embeddings draws one run on a page: give its directory, and --report")
            return _plot_embeddings(context, paths[0], overrides)
        if unused := [name for name in typed_options(context) if name in _OF_EMBEDDINGS]:
            raise PlanError(f"{', '.join(unused)}: this goes with --embeddings")
        if overrides:
            raise PlanError(f"{overrides[0]}: values of a config are for --embeddings")
        sweeps = [folder for path in paths if (folder := sweep_folder(str(path))) is not None]
        if sweeps and len(paths) > 1:
            raise PlanError(f"{sweeps[0]} is a sweep, which is drawn alone")
        folder = sweeps[0] if sweeps else None
        if folder is None:
            _plot_runs(paths, context.params)
        elif metric or as_json or smooth or x != "step":
            raise PlanError(
                "--metric, --x, --smooth and --json are for runs; samestep show SWEEP --json has the trials"
            )
        else:
            _plot_sweep(folder, picture, report, force, trust)


def _plot_runs(runs: Sequence[Path], given: Mapping[str, Any]) -> None:
    from samestep.report.curves.history import read_histories
    from samestep.report.curves.panels import choose
    from samestep.report.curves.summary import as_json as document
    from samestep.report.curves.summary import table

    picture, report = given["picture"], given["report"]
    refuse_outputs(report, picture, force=given["force"])
    histories = read_histories(runs)
    metrics = choose(histories, given["metric"] or [])
    for history in histories:
        if history.unread:
            typer.echo(f"{history.run}: {history.unread} line(s) hold no row of numbers", err=True)
        if not history.metrics:
            typer.echo(f"{history.run}: no numbers yet", err=True)
    if given["as_json"]:
        typer.echo(json.dumps(document(histories, metrics), allow_nan=False))
    else:
        header, rows = table(histories, metrics)
        print_rows(header, [tuple(row) for row in rows])
    if picture is not None or report is not None:
        _draw(histories, metrics, given)


def _draw(histories: Sequence[History], metrics: Sequence[str], given: Mapping[str, Any]) -> None:
    from samestep.report.curves.page import write_html
    from samestep.report.curves.panels import MOST_PANELS, panels_of
    from samestep.report.picture import write_panels

    picture, report, force = given["picture"], given["report"], given["force"]
    panels = panels_of(histories, metrics, given["x"], given["smooth"])
    if len(panels) > MOST_PANELS:
        left = len(panels) - MOST_PANELS
        typer.echo(f"{left} metrics are not drawn: choose others with --metric", err=True)
    if picture is not None:
        try:
            title = ", ".join(one.label for one in histories)
            write_panels(title, panels[:MOST_PANELS], picture, force)
            typer.echo(f"Plot: {picture}", err=True)
        except MissingExtraError as error:
            typer.echo(f"No plot: {error}", err=True)
    if report is not None:
        write_html(histories, metrics, panels[:MOST_PANELS], report, force)
        typer.echo(f"Page: {report}", err=True)


def _plot_sweep(folder: Path, picture: Path | None, report: Path | None, force: bool, trust: bool) -> None:
    from samestep.sweep.plots import plots_of
    from samestep.sweep.reading import reload_sweep

    page = folder / "plots.html" if picture is None and report is None else report
    refuse_outputs(page, picture, force=force)
    plots = plots_of(reload_sweep(folder, trust))
    for remark in plots.remarks:
        typer.echo(remark, err=True)
    if page is not None:
        plots.write_report(page, force)
        typer.echo(f"Page: {page}")
    if picture is not None:
        plots.write_picture(picture, force)
        typer.echo(f"Plot: {picture}")


def _plot_embeddings(context: typer.Context, run: Path, overrides: list[str]) -> None:
    from samestep.models.embeddings.projection import chosen_maps
    from samestep.run.origin import refuse_untrusted_task
    from samestep.run.run_dir import config_of

    given = context.params
    page, names = given["report"] or run / "embeddings.html", chosen_maps(given["maps"])
    refuse_outputs(page, force=given["force"])
    config = config_of(run, overrides)
    refuse_untrusted_task(run, config, overrides, given["trust"])  # before it sets up the ranks
    with as_rank(config, context, given["local_rank"], needs_lanes=False) as place:
        from samestep.models.embeddings.embedded import EmbeddingRequest, embed_run
        from samestep.models.embeddings.report import picture_of, write_html

        kept = ("data", "reference", "view", "points", "which", "weights", "trust")
        request = EmbeddingRequest(run, overrides=tuple(overrides), **{key: given[key] for key in kept})
        found = embed_run(request, place)
        if found is not None:
            drawn = picture_of(found, names)
            write_html(found, drawn, run, page, given["force"])
            _print_embeddings(found, drawn, page, given["as_json"])


def _print_embeddings(found: EmbeddedRun, drawn: Picture, page: Path, as_json: bool) -> None:
    maps, errors = [one.name for one in drawn.maps], drawn.errors
    if as_json:
        made = {
            "page": str(page),
            "points": len(found.drawn.rows),
            "samples": found.samples,
            "maps": maps,
            "missing": drawn.missing,
            "errors": errors,
            "view": found.drawn.view,
            "step": found.step,
            "weights": found.weights,
        }
        typer.echo(json.dumps(made))
        return
    wrong = "" if errors is None else f", {errors} of them errors"
    typer.echo(f"{len(found.drawn.rows)} points{wrong}, on {', '.join(maps)}: {page}")
    for reason in drawn.missing:
        typer.echo(f"There is {reason}", err=True)
