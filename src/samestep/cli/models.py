"""The commands that use a trained model: predict, average, export."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    print_rows,
    usable,
)
from samestep.cli.ranks import as_rank
from samestep.errors import LaunchError

if TYPE_CHECKING:
    from samestep.models.checkpoint_average import Averaged, By
    from samestep.models.export.export_run import Exported


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
            from samestep.models.predict import PredictRequest, predict_once

            request = PredictRequest(
                run=run, data=data, output=output, format=file_format, which=which, weights=weights,
                batch=batch, force=force, overrides=tuple(overrides or ()), trust=trust,
                kind="embeddings" if embeddings else "predictions", view=view,
            )  # fmt: skip
            done = predict_once(request, place)
            if place.is_main and as_json:
                typer.echo(json.dumps(asdict(done)))
            elif place.is_main:
                typer.echo(f"{done.samples} samples, step {done.step}: {done.output}")


_Last = Annotated[int | None, typer.Option(min=1, help="Average this many newest checkpoints.")]
_Best = Annotated[int | None, typer.Option(min=1, help="Or this many with the best best.metric.")]


@app.command(rich_help_panel=MODELS)
def average(
    context: typer.Context,
    run: RunDirPath,
    overrides: Overrides = None,
    last: _Last = None,
    best: _Best = None,
    trust: Trust = False,
    as_json: AsJson = False,
    local_rank: LocalRank = None,
) -> None:
    """Average a run's last or best checkpoints, measure the mean and write average.safetensors.

    Alone, or as a rank of any launcher. Without --last and --best: the checkpoint.keep_last
    newest.

    Example: samestep average runs/digits --last 3
    """
    with guarded():
        from samestep.run.origin import refuse_untrusted_task
        from samestep.run.run_dir import config_of

        if last is not None and best is not None:
            raise LaunchError(f"you set --last {last} and --best {best}: keep one of them")
        config = config_of(run, overrides or [])
        refuse_untrusted_task(run, config, overrides or (), trust)  # before it sets up the ranks
        with as_rank(config, context, local_rank) as place:
            from samestep.models.checkpoint_average import average_run

            count = best or last or config.checkpoint.keep_last
            by: By = "best" if best else "last"
            made = average_run(run, config, place, count, by)
            if place.is_main:
                _show(made, as_json)


def _show(made: Averaged, as_json: bool) -> None:
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "metric": made.metric,
                    "checkpoints": [{"step": step, "value": value} for step, value in made.checkpoints.items()],
                    "average": {"value": made.value, "metrics": made.values},
                    "path": str(made.path),
                }
            )
        )
        return
    rows = [(f"step {step}", _number(value)) for step, value in made.checkpoints.items()]
    print_rows(("weights", made.metric), [*rows, ("their average", _number(made.value))])
    typer.echo(f"wrote {made.path}")


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.6g}"


Extra = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE", help="With pt: another key, as YAML, or @FILE for a file of it; may be repeated."
    ),
]


@app.command("export", rich_help_panel=MODELS)
def export_command(
    run: RunDirPath,
    overrides: Overrides = None,
    to: Annotated[
        str, typer.Option(help="torchscript, pt2, onnx, safetensors, or pt: a checkpoint by torch.save.")
    ] = "torchscript",
    which: Annotated[str, typer.Option(help="best, last, or the number of a step.")] = "best",
    weights: Annotated[str, typer.Option(help="raw, ema, swa or average.")] = "raw",
    output: Annotated[
        Path | None, typer.Option(callback=usable, help="The file to write; RUN/export/NAME.* if not given.")
    ] = None,
    methods: Annotated[str, typer.Option(help="Methods that a torchscript file must have, as a,b.")] = "",
    device: Annotated[str, typer.Option(help="Where the exported model lives.")] = "cpu",
    extra: Extra = None,
    force: Force = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's model for other programs, and compare the file with the model.

    The file is kept only if it gives the model's own outputs on real batches; otherwise the
    exit code is 4. With --to pt it is {"model_state_dict", "optimizer_state_dict", "epoch"}, as other
    projects write and read it.

    Example: samestep export runs/digits --to onnx
    """
    with guarded():
        if to == "pt":
            if methods or overrides or device != "cpu":
                raise LaunchError(
                    "--methods, --device and values of the config do nothing with --to pt: leave them out"
                )
            return _write_checkpoint(run, which, weights, output, extra or [], force, as_json)
        if extra:
            raise LaunchError("--extra adds keys to a file of --to pt: leave it out")
        from samestep.models.export.export_run import export_run

        done = export_run(
            run,
            to,
            which=which,
            of=weights,
            output=output,
            methods=[name.strip() for name in methods.split(",") if name.strip()],
            device=device,
            overrides=overrides or [],
            force=force,
            trust=trust,
        )
        if as_json:
            typer.echo(json.dumps({"path": str(done.path), "notes": done.notes, **done.facts}))
        else:
            typer.echo("\n".join(_lines(done)))


def _write_checkpoint(
    run: Path, which: str, weights: str, output: Path | None, extra: list[str], force: bool, as_json: bool
) -> None:
    from samestep.checkpoint.torch_file import write_torch_file

    path = output or run / "export" / f"{run.resolve().name}.pt"
    manifest = write_torch_file(run, which, path, force or output is None, weights, dict(map(_extra_key, extra)))
    if as_json:
        typer.echo(json.dumps({"path": str(path), "format": "pt", "step": manifest.step, "weights": weights}))
    else:
        typer.echo(f"wrote {path}: pt, step {manifest.step}, {weights} weights")


def _extra_key(text: str) -> tuple[str, Any]:
    """Return the key and the value of `KEY=VALUE`."""
    from samestep.errors import TextError
    from samestep.parsing.files import read_text
    from samestep.parsing.plain_yaml import parse_yaml

    key, equals, value = text.partition("=")
    if not key or not equals:
        raise LaunchError(f"--extra is {text!r}: write KEY=VALUE, or KEY=@FILE")
    try:
        return key, parse_yaml(read_text(Path(value[1:])) if value.startswith("@") else value)
    except TextError as error:
        raise LaunchError(f"--extra {key}: {value} {error}") from None


def _lines(done: Exported) -> list[str]:
    facts = done.facts
    methods = {"forward": facts, **facts["methods"]}
    return [
        f"wrote {done.path}: {facts['format']}, {facts['how']}, step {facts['step']}, "
        f"{facts['weights']} weights, {facts['bytes'] / 1e6:.3g} MB",
        *(f"  {name}({_kinds(each['inputs'])}) -> {_kinds(each['outputs'])}" for name, each in methods.items()),
        f"  {_agreement(facts['compared'])}",
        *(f"  note: {note}" for note in done.notes),
    ]


def _kinds(tensors: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{tensor['name']} {tensor['dtype']}[{', '.join(map(str, tensor['shape']))}]" for tensor in tensors
    )


def _agreement(compared: dict[str, Any]) -> str:
    *sizes, last = map(str, compared["batches"])
    what = f"loaded again and compared with the model on {compared['data']} batches of {', '.join(sizes)} and {last}: "
    if compared["exact"]:
        return what + "every value is equal"
    return what + f"the largest difference is {compared['largest_difference']:.3g}"
