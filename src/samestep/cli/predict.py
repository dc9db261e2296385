"""The commands that use a trained model: predict and embed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

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

Data = Annotated[
    str,
    typer.Argument(
        help="valid, train, or a name that the task's predict_data knows.", metavar="DATA"
    ),
]
Output = Annotated[
    Path, typer.Option(callback=usable, help="The file: .csv, .jsonl, .parquet or .npy.")
]
Which = Annotated[str, typer.Option(help="best, last, or the number of a step.")]
Weights = Annotated[str, typer.Option(help="raw, ema, swa or average.")]
FileFormat = Annotated[
    str | None, typer.Option("--format", help="csv, jsonl, parquet or npy; else by the suffix.")
]
Batch = Annotated[
    int | None, typer.Option(min=1, help="Samples in one forward pass; as in evaluation.")
]


@app.command(rich_help_panel=MODELS)
def predict(
    context: typer.Context,
    run: RunDirPath,
    data: Data,
    output: Output,
    overrides: Overrides = None,
    which: Which = "best",
    weights: Weights = "raw",
    file_format: FileFormat = None,
    batch: Batch = None,
    force: Force = False,
    trust: Trust = False,
    as_json: AsJson = False,
    local_rank: LocalRank = None,
) -> None:
    """Write a trained model's predictions for every sample, in order; alone, or as a rank."""
    with guarded():
        _write(
            context, local_rank, as_json, run=run, data=data, output=output, format=file_format,
            which=which, weights=weights, batch=batch, force=force,
            overrides=tuple(overrides or ()), trust=trust,
        )  # fmt: skip


@app.command(rich_help_panel=MODELS)
def embed(
    context: typer.Context,
    run: RunDirPath,
    data: Data,
    output: Output,
    overrides: Overrides = None,
    view: Annotated[
        str | None, typer.Option(help="Which of the task's embeddings; all unless given.")
    ] = None,
    which: Which = "best",
    weights: Weights = "raw",
    file_format: FileFormat = None,
    batch: Batch = None,
    force: Force = False,
    trust: Trust = False,
    as_json: AsJson = False,
    local_rank: LocalRank = None,
) -> None:
    """Write a trained model's embeddings of every sample, in order; alone, or as a rank."""
    with guarded():
        _write(
            context, local_rank, as_json, run=run, data=data, output=output, format=file_format,
            which=which, weights=weights, batch=batch, force=force,
            overrides=tuple(overrides or ()), trust=trust, kind="embeddings", view=view,
        )  # fmt: skip


def _write(context: typer.Context, local_rank: int | None, as_json: bool, **request: Any) -> None:
    from samestep.train.origin import refuse_untrusted_task
    from samestep.train.run_dir import config_of

    run, overrides = request["run"], request["overrides"]
    config = config_of(run, overrides)
    # Before it sets up the ranks.
    refuse_untrusted_task(run, config, overrides, request["trust"])
    with as_rank(config, context, local_rank, needs_lanes=False) as place:
        from samestep.models.predict import Request, predict_once

        done = predict_once(Request(**request), place)
        if place.is_main and as_json:
            typer.echo(json.dumps(asdict(done)))
        elif place.is_main:
            typer.echo(f"{done.samples} samples, step {done.step}: {done.output}")
