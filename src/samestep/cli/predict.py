"""The command that writes what a trained model computes: predict."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from samestep.cli.app import MODELS, AsJson, Force, LocalRank, Overrides, RunDirPath, Trust, app, guarded, usable
from samestep.cli.ranks import as_rank

Data = Annotated[
    str, typer.Argument(help="valid, train, or a name that the task's predict_data knows.", metavar="DATA")
]
Output = Annotated[Path, typer.Option(callback=usable, help="The file: .csv, .jsonl, .parquet or .npy.")]
Which = Annotated[str, typer.Option(help="best, last, or the number of a step.")]
Weights = Annotated[str, typer.Option(help="raw, ema, swa or average.")]
FileFormat = Annotated[str | None, typer.Option("--format", help="csv, jsonl, parquet or npy; else by the suffix.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Samples in one forward pass; as in evaluation.")]


@app.command(rich_help_panel=MODELS)
def predict(
    context: typer.Context,
    run: RunDirPath,
    data: Data,
    output: Output,
    overrides: Overrides = None,
    embeddings: Annotated[bool, typer.Option("--embeddings", help="Write embeddings in place of predictions.")] = False,
    view: Annotated[str | None, typer.Option(help="Which of the task's embeddings; all unless given.")] = None,
    which: Which = "best",
    weights: Weights = "raw",
    file_format: FileFormat = None,
    batch: Batch = None,
    force: Force = False,
    trust: Trust = False,
    as_json: AsJson = False,
    local_rank: LocalRank = None,
) -> None:
    """Write a trained model's predictions, or embeddings, for every sample, in order; alone, or as a rank.

    Example: samestep predict runs/digits valid --output predictions.csv
    """
    with guarded():
        from samestep.errors import PlanError
        from samestep.run.origin import refuse_untrusted_task
        from samestep.run.run_dir import config_of

        if view is not None and not embeddings:
            raise PlanError("--view chooses among embeddings: add --embeddings, or leave it out")
        config = config_of(run, overrides or [])
        refuse_untrusted_task(run, config, overrides or (), trust)  # before it sets up the ranks
        with as_rank(config, context, local_rank, needs_lanes=False) as place:
            from samestep.models.predict import Request, predict_once

            request = Request(
                run=run, data=data, output=output, format=file_format, which=which, weights=weights,
                batch=batch, force=force, overrides=tuple(overrides or ()), trust=trust,
                kind="embeddings" if embeddings else "predictions", view=view,
            )  # fmt: skip
            done = predict_once(request, place)
            if place.is_main and as_json:
                typer.echo(json.dumps(asdict(done)))
            elif place.is_main:
                typer.echo(f"{done.samples} samples, step {done.step}: {done.output}")
