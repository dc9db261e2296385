"""The command that uses a trained model: predict."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from samestep.cli.app import (
    AsJson,
    LocalRank,
    Overrides,
    RunFolderPath,
    app,
    guarded,
    threads_before_torch,
)
from samestep.runtime.environment import (
    check_local_rank,
    detect_launch,
    has_agent,
    process_environment,
)


@app.command()
def predict(
    context: typer.Context,
    run: RunFolderPath,
    data: Annotated[
        str,
        typer.Argument(help="valid, train, or what the task's predict_data knows.", metavar="DATA"),
    ],
    output: Annotated[Path, typer.Option(help="The file: .csv, .jsonl or .parquet.")],
    overrides: Overrides = None,
    which: Annotated[str, typer.Option(help="best, last, or the number of a step.")] = "best",
    weights: Annotated[str, typer.Option(help="raw, ema, swa or average.")] = "raw",
    file_format: Annotated[
        str | None, typer.Option("--format", help="csv, jsonl or parquet; else by the suffix.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples in one forward pass; as in evaluation.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: AsJson = False,
    local_rank: LocalRank = None,
) -> None:
    """Write what a trained model says of every sample, in order: alone, or as one of many ranks."""
    with guarded(), ExitStack() as scope:
        from samestep.folder import config_of

        config = config_of(run, overrides or [])
        launch = detect_launch(process_environment())
        scope.enter_context(threads_before_torch(config.distributed, launch))
        from samestep.prediction import Request, predict_once
        from samestep.runtime.context import create_run_context
        from samestep.runtime.hardware import detect_hardware
        from samestep.runtime.signals import stop_with_parent

        if has_agent(process_environment()):
            stop_with_parent()
        check_local_rank(context.obj if local_rank is None else local_rank, launch)
        request = Request(
            run, data, output, file_format, which, weights, batch, force, tuple(overrides or ())
        )
        with create_run_context(config, detect_hardware(), launch) as place:
            done = predict_once(request, place)
            if place.is_main and as_json:
                typer.echo(json.dumps(asdict(done)))
            elif place.is_main:
                typer.echo(f"{done.samples} samples, step {done.step}: {done.output}")
