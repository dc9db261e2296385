"""The command that writes files to start from: init."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from samestep.cli.app import STARTING, app, guarded, print_rows, usable
from samestep.environment.launch import LaunchMethod
from samestep.errors import LaunchError

if TYPE_CHECKING:
    from samestep.cli.starter import Answers

_CONFIGS = (".yaml", ".yml")


Precision = Literal["fp32", "tf32", "bf16", "fp16", "auto"]
"""The number format of a training."""


Place = Annotated[
    Path | None,
    typer.Argument(
        callback=usable,
        help="Where to write: a folder, or the config's file; created if missing.",
        metavar="FOLDER|CONFIG.yaml",
    ),
]


@app.command(rich_help_panel=STARTING)
def init(
    context: typer.Context,
    path: Place = None,
    template: Annotated[
        str, typer.Option(help="The kind of machine, of those that --list shows.", metavar="NAME")
    ] = "",
    show_templates: Annotated[bool, typer.Option("--list", help="Show the templates, and exit.")] = False,
    name: Annotated[str | None, typer.Option(help="The run's name; its folder's if not set.")] = None,
    task: Annotated[
        str | None, typer.Option(metavar="FILE.py:Class", help="Your task; the starter's is written if not set.")
    ] = None,
    global_batch: Annotated[int | None, typer.Option(help="Samples in one step.")] = None,
    lanes: Annotated[int | None, typer.Option(help="Equal parts of it.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="A class of torch.optim, or task: the task makes it.")] = None,
    lr: Annotated[float | None, typer.Option(help="The learning rate.")] = None,
    precision: Annotated[Precision | None, typer.Option(help="The number format.")] = None,
    via: Annotated[LaunchMethod | None, typer.Option(help="What starts its ranks.")] = None,
) -> None:
    """Write a commented config.yaml, and a task.py unless you name your own.

    Example: samestep init mine --epochs 10
    """
    with guarded():
        from samestep.cli.starter import refuse_existing
        from samestep.cli.starter.templates import TEMPLATES

        if show_templates:
            rows = [(one.name, one.machine, "\n".join(one.shown_commands("CONFIG"))) for one in TEMPLATES.values()]
            return print_rows(("template", "for", "started by"), rows)
        if path is None:
            raise LaunchError("nowhere to write: give a folder, or --list")
        file = path if path.suffix in _CONFIGS else path / "config.yaml"
        given = {key: context.params[key] for key in _ANSWERS}
        if template and path.suffix in _CONFIGS:
            raise LaunchError(f"a template is several files: give a folder, not {path}")
        if template and any(value is not None for value in given.values()):
            raise LaunchError("a template has its own answers: leave out the others, and edit its config")
        refuse_existing([file])
        _write(file, template, None if template else _answers(given, file))


_ANSWERS = ("name", "task", "global_batch", "lanes", "epochs", "optimizer", "lr", "precision", "via")


def _write(file: Path, template: str, answers: Answers | None) -> None:
    from samestep.cli.starter import write_config
    from samestep.cli.starter.templates import write_template

    if answers is None:
        chosen, written = write_template(template, file.parent)
        commands = chosen.shown_commands(written[0])
    else:
        written = write_config(file, answers)
        verb = "train" if answers.via == "torchrun" else "launch"
        commands = [f"samestep {verb} {file}"]
    for path in written:
        typer.echo(f"wrote {path}")
    for command in commands:
        typer.echo(f"now: {command}")


def _answers(given: Mapping[str, Any], file: Path) -> Answers:
    """Return what was given, else the defaults; a task without optimizers gets one."""
    from samestep.cli.starter import OWN_OPTIMIZER, TASK, Answers, makes_optimizers

    answers = Answers(**{key: value for key, value in given.items() if value is not None})
    is_starter = answers.task == TASK
    if given["optimizer"] is None and not is_starter and not makes_optimizers(answers.task, file.parent):
        answers = replace(answers, optimizer="adamw")
    if answers.lr is None and answers.optimizer != OWN_OPTIMIZER:
        answers = replace(answers, lr=0.01 if is_starter else 0.001)
    return answers
