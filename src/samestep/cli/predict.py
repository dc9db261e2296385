"""The command that uses a trained model: predict."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

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


@app.command(rich_help_panel=MODELS)
def predict(
    context: typer.Context,
    run: RunDirPath,
    data: Annotated[
        str,
        typer.Argument(
            help="valid, train, or a name that the task's predict_data knows.", metavar="DATA"
        ),
    ],
    output: Annotated[
        Path, typer.Option(callback=usable, help="The file: .csv, .jsonl or .parquet.")
    ],
    overrides: Overrides = None,
    which: Annotated[str, typer.Option(help="best, last, or the number of a step.")] = "best",
    weights: Annotated[str, typer.Option(help="raw, ema, swa or average.")] = "raw",
    file_format: Annotated[
        str | None, typer.Option("--format", help="csv, jsonl or parquet; else by the suffix.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples in one forward pass; as in evaluation.")
    ] = None,
    force: Force = False,
    trust: Trust = False,
    as_json: AsJson = False,
    local_rank: LocalRank = None,
) -> None:
    """Write a trained model's predictions for every sample, in order; alone, or as a rank."""
    with guarded():
        from samestep.train.origin import refuse_untrusted_task
        from samestep.train.run_dir import config_of

        config = config_of(run, overrides or [])
        refuse_untrusted_task(run, config, overrides or (), trust)  # before it sets up the ranks
        with as_rank(config, context, local_rank, needs_lanes=False) as place:
            from samestep.inference.predict import Request, predict_once

            request = Request(
                run, data, output, file_format, which, weights, batch, force,
                tuple(overrides or ()), trust,
            )  # fmt: skip
            done = predict_once(request, place)
            if place.is_main and as_json:
                typer.echo(json.dumps(asdict(done)))
            elif place.is_main:
                typer.echo(f"{done.samples} samples, step {done.step}: {done.output}")
