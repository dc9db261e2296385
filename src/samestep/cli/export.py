"""The command that writes a trained model for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.cli.app import MODELS, AsJson, Force, Overrides, RunDirPath, Trust, app, guarded, usable
from samestep.errors import LaunchError

if TYPE_CHECKING:
    from samestep.models.export.export_run import Exported

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
