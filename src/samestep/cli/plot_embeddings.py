"""The command that draws a run's embeddings: plot-embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import (
    MODELS,
    AsJson,
    Force,
    LocalRank,
    Overrides,
    RunDirPath,
    Trust,
    app,
    guarded,
    usable,
)
from samestep.cli.ranks import as_rank

if TYPE_CHECKING:
    from samestep.models.embeddings.embedded import EmbeddedRun
    from samestep.models.embeddings.report import Picture

PAGE = "embeddings.html"


@app.command("plot-embeddings", rich_help_panel=MODELS)
def plot_embeddings(
    context: typer.Context,
    run: RunDirPath,
    overrides: Overrides = None,
    data: Annotated[
        str, typer.Option(help="valid, train, or a name that the task's predict_data knows.")
    ] = "valid",
    reference: Annotated[
        str, typer.Option(help="Where neighbours are sought: train, valid, a name, or none.")
    ] = "train",
    view: Annotated[
        str | None, typer.Option(help="Which of the task's embeddings; the first if not given.")
    ] = None,
    maps: Annotated[str, typer.Option(help="Which maps, as pca,tsne,umap.")] = "pca,tsne,umap",
    perplexity: Annotated[
        float | None, typer.Option(help="Of t-SNE; by the number of points if not given.")
    ] = None,
    points: Annotated[int, typer.Option(min=2, max=20000, help="Draw this many at most.")] = 2000,
    which: Annotated[str, typer.Option(help="best, last, or the number of a step.")] = "best",
    weights: Annotated[str, typer.Option(help="raw, ema, swa or average.")] = "raw",
    output: Annotated[
        Path | None, typer.Option(callback=usable, help=f"The page; RUN/{PAGE} if not given.")
    ] = None,
    force: Force = False,
    trust: Trust = False,
    as_json: AsJson = False,
    local_rank: LocalRank = None,
) -> None:
    """Draw a run's embeddings on a page: PCA, t-SNE and UMAP, with pictures, classes and errors.

    Alone, or as a rank. An error is a sample whose nearest reference is of another class.
    """
    with guarded():
        from samestep.models.embeddings.projection import chosen_maps
        from samestep.report.page import refuse_other_file
        from samestep.train.origin import refuse_untrusted_task
        from samestep.train.run_dir import config_of

        page, names = output or run / PAGE, chosen_maps(maps)
        if not force:
            refuse_other_file(page, "--force replaces it, or name another file")
        config = config_of(run, overrides or [])
        refuse_untrusted_task(run, config, overrides or (), trust)  # before it sets up the ranks
        with as_rank(config, context, local_rank, needs_lanes=False) as place:
            from samestep.models.embeddings.embedded import Request, embed_run
            from samestep.models.embeddings.report import picture_of, write_html

            request = Request(
                run, data, reference, view, points, which, weights, tuple(overrides or ()), trust
            )
            found = embed_run(request, place)
            if found is not None:
                picture = picture_of(found, names, perplexity)
                write_html(found, picture, run, page, force)
                _show(found, picture, page, as_json)


def _show(found: EmbeddedRun, picture: Picture, page: Path, as_json: bool) -> None:
    maps, errors = [one.name for one in picture.maps], picture.errors
    if as_json:
        made = {
            "page": str(page),
            "points": len(found.drawn.rows),
            "samples": found.samples,
            "maps": maps,
            "missing": picture.missing,
            "errors": errors,
            "view": found.drawn.view,
            "step": found.step,
            "weights": found.weights,
        }
        typer.echo(json.dumps(made))
        return
    wrong = "" if errors is None else f", {errors} of them errors"
    typer.echo(f"{len(found.drawn.rows)} points{wrong}, on {', '.join(maps)}: {page}")
    for reason in picture.missing:
        typer.echo(f"There is {reason}", err=True)
