"""The command that writes a config from a few answers: config new."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.cli.app import guarded, usable
from samestep.cli.inspect import config_app

if TYPE_CHECKING:
    from samestep.cli.starter import Answers


class Precision(str, Enum):
    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"
    fp16 = "fp16"
    auto = "auto"


class Via(str, Enum):
    torchrun = "torchrun"
    mpirun = "mpirun"
    slurm = "slurm"
    ssh = "ssh"


@config_app.command()
def new(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(callback=usable, help="The file to write.", metavar="[CONFIG]")
    ] = Path("config.yaml"),
    name: Annotated[str | None, typer.Option(help="The run's name; its folder's if empty.")] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:Class", help="Your task; the starter's is written if not set."
        ),
    ] = None,
    global_batch: Annotated[int | None, typer.Option(help="Samples in one step.")] = None,
    lanes: Annotated[int | None, typer.Option(help="Equal parts of it.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="A class of torch.optim, or task: the task makes it.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="The learning rate.")] = None,
    precision: Annotated[Precision | None, typer.Option(help="The number format.")] = None,
    via: Annotated[Via | None, typer.Option(help="What starts its ranks.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take defaults.")] = False,
) -> None:
    """Ask a few questions and write a commented config; options answer them beforehand."""
    with guarded():
        from samestep.cli.starter import refuse_existing, write_config

        refuse_existing([file])  # before anything is asked
    answers = _answers(context.params, file, yes)  # not guarded: Ctrl-C ends it as everywhere
    with guarded():
        for path in write_config(file, answers):
            typer.echo(f"wrote {path}")
        verb = "train" if via is None or via is Via.torchrun else "launch"
        typer.echo(f"now: samestep {verb} {file}")


def _answers(given: dict[str, Any], file: Path, yes: bool) -> Answers:
    """What was given, then asked, then the defaults."""
    from samestep.cli.starter import OWN_OPTIMIZER, TASK, Answers, makes_optimizers

    def ask(key: str, question: str, default: Any, kind: Any = str) -> Any:
        value = given[key]
        if value is not None or yes:
            return default if value is None else value
        return typer.prompt(question, default=default, type=kind)

    def choose(key: str, question: str, default: str, kind: type[Enum]) -> str:
        names = [member.value for member in kind]
        answer = ask(key, f"{question} ({', '.join(names)})", default)
        while (text := answer.value if isinstance(answer, Enum) else answer) not in names:
            answer = ask(key, f"Not {text}, but one of {', '.join(names)}", default)
        return str(text)

    first = Answers()
    name = ask("name", "The run's name", None if yes else file.absolute().parent.name)
    task = ask("task", f"Your task, as FILE.py:Class ({TASK}: one to start from is written)", TASK)
    sizes = {
        "global_batch": ask("global_batch", "Samples in one step of the whole run", 64, int),
        "lanes": ask("lanes", "Lanes, equal parts of it: the most ranks it can use", 8, int),
        "epochs": ask("epochs", "Passes over the data", 3, int),
    }
    own = task == TASK or makes_optimizers(task, file.parent)
    optimizer = ask(
        "optimizer",
        f"Optimizer: a class of torch.optim, or {OWN_OPTIMIZER} for the task's own",
        OWN_OPTIMIZER if own else "adamw",
    )
    lr = given["lr"]
    if lr is None and (optimizer != OWN_OPTIMIZER or task == TASK):
        lr = ask("lr", "Learning rate", 0.01 if task == TASK else 0.001, float)
    return Answers(
        name=name or None,
        task=task,
        optimizer=optimizer,
        lr=lr,
        precision=choose("precision", "Precision", first.precision, Precision),
        via=choose("via", "What starts its ranks", first.via, Via),
        **sizes,
    )
