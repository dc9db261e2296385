"""The command that measures all settings: tune all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import AsJson, Overrides, guarded, print_rows, reporting, usable
from samestep.cli.config_layer import Setting, refuse_layer, write_layer
from samestep.cli.tune.shared import Rounds, Steps, tune_app
from samestep.distributed.signals import DeferredSignals
from samestep.environment.variables import process_environment

if TYPE_CHECKING:
    from samestep.bench.tuning.recommend import Advised

ConfigOption = Annotated[
    Path | None,
    typer.Argument(callback=usable, help="The run's YAML or JSON file; a small task, if not given.", metavar="CONFIG"),
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer choices and short turns.")]
Write = Annotated[
    Path | None,
    typer.Option(callback=usable, help="Write the recommendation as a config, FILE.yaml, that includes CONFIG."),
]
_ANOTHER = "This changes what the training computes: it is another run."
_QUICK_STEPS = 5


@tune_app.command("all")
def settings(
    config: ConfigOption = None,
    overrides: Overrides = None,
    quick: Quick = False,
    rounds: Rounds = 5,
    steps: Steps = None,
    write: Write = None,
    as_json: AsJson = False,
) -> None:
    """Measure ranks, threads, lanes, workers, precision, sharding and batch, and recommend settings.

    Trains for some seconds with each choice; saves nothing.

    Example: samestep tune all config.yaml --write tuned.yaml
    """
    with guarded(), DeferredSignals(), _file_of(config, write) as file:
        from samestep.bench.tuning.recommend import Request, tune_all
        from samestep.config import load_config
        from samestep.distributed.quick_hardware import quick_hardware

        loaded = load_config(file, overrides or [])
        if quick and steps is None:
            steps = _QUICK_STEPS
        if write is not None:
            refuse_layer(write)
        with reporting() as line:
            request = Request(loaded, file, tuple(overrides or ()), quick, rounds, steps, report=line)
            found = tune_all(request, quick_hardware(process_environment()))
        if as_json:
            typer.echo(json.dumps(found.as_json()))
        else:
            _print(found, config)
        if write is not None and config is not None:
            _write(found, config, write)


@contextmanager
def _file_of(config: Path | None, write: Path | None) -> Iterator[Path]:
    """The config's file; of none given, that of a small task."""
    if config is not None:
        yield config
        return
    from samestep.cli.starter import write_starter
    from samestep.errors import PlanError

    if write is not None:
        raise PlanError("--write includes a config, and none is given: samestep tune all CONFIG")
    with TemporaryDirectory(prefix="samestep-tune-") as folder:
        write_starter(Path(folder))
        yield Path(folder) / "config.yaml"


def _print(found: Advised, config: Path | None) -> None:
    layouts = [
        (way.label, timed.failed or timed.shown, "recommended" if way == found.layout else "")
        for way, timed in found.tried
    ]
    others = [(one.label, one.failed or one.shown, "") for one in found.measured]
    print_rows(("on this machine", "a step (95 % range)", ""), [*layouts, *others])
    answers = {True: "yes", False: "no", None: "-"}
    rows = [(one.speaks_for, one.text, answers[one.holds], one.why) for one in found.conditions]
    print_rows(("speaks for", "if", "here", "because"), rows)
    advice = [(one.topic, one.says) for one in found.advice]
    print_rows(("setting", "recommendation"), advice)
    values = [f"{key}={json.dumps(value)}" for key, value in found.overrides.items()]
    file = "CONFIG" if config is None else str(config)
    nothing = "The config has what is recommended."
    typer.echo(f"samestep train {file} {' '.join(values)}" if values else nothing)
    changing = [one.topic for one in found.advice if one.another_run]
    if changing:
        typer.echo(f"Another run, with other results: {', '.join(changing)}.")


def _write(found: Advised, config: Path, path: Path) -> None:
    if not found.overrides:
        typer.echo(f"{path} is not written: the config has what is recommended", err=True)
        return
    settings = [
        Setting(key, value, [f"{one.topic}: {one.says}", *([_ANOTHER] if one.another_run else [])])
        for one in found.advice
        for key, value in one.overrides.items()
    ]
    write_layer(path, config, "samestep tune all", settings)
    typer.echo(f"Config: {path}, which includes {config}", err=True)
