"""The command that measures which settings suit a training here: advise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import (
    MODELS,
    AsJson,
    Launched,
    LocalRank,
    Overrides,
    app,
    guarded,
    print_rows,
    usable,
)
from samestep.cli.bench.shared import Result
from samestep.cli.config_layer import Setting, refuse_layer, write_layer
from samestep.cli.ranks import as_rank
from samestep.distributed.deferred_signals import DeferredSignals
from samestep.environment.launch import detect_launch
from samestep.environment.variables import process_environment

if TYPE_CHECKING:
    from samestep.advise.run import Advised
    from samestep.config import Config

ConfigOption = Annotated[
    Path | None,
    typer.Argument(
        callback=usable, help="The run's YAML or JSON file; a small task, if not given.",
        metavar="[CONFIG]",
    ),
]  # fmt: skip
Quick = Annotated[bool, typer.Option("--quick", help="Fewer choices and short turns.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns of each; 4 are the fewest with a range.")]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Timed steps of a turn; about a second's, if not given.")
]
Write = Annotated[
    Path | None,
    typer.Option(
        callback=usable,
        help="Write the recommendation as a config, FILE.yaml, that includes CONFIG.",
    ),
]
# What ranks that this command has started measure.
Variants = Annotated[str, typer.Option(hidden=True)]
_ANOTHER = "This changes what the training computes: it is another run."
_QUICK_STEPS = 5


@app.command(rich_help_panel=MODELS)
def advise(
    context: typer.Context,
    config: ConfigOption = None,
    overrides: Overrides = None,
    quick: Quick = False,
    rounds: Rounds = 5,
    steps: Steps = None,
    write: Write = None,
    as_json: AsJson = False,
    variants: Variants = "",
    result: Result = None,
    local_rank: LocalRank = None,
    launched: Launched = False,
) -> None:
    """Measure ranks, threads, lanes, workers, precision and batch here, and recommend settings.

    Trains for some seconds with each choice; saves nothing.
    """
    with guarded(launched), DeferredSignals(), _file_of(config, write) as file:
        from samestep.config import load_config

        loaded = load_config(file, overrides or [])
        if quick and steps is None:
            steps = _QUICK_STEPS
        if result is not None:
            _measure_as_rank(loaded, context, local_rank, variants, (rounds, steps), result)
            return
        from samestep.advise.run import Request
        from samestep.advise.run import advise as find_advice
        from samestep.distributed.quick_hardware import quick_hardware
        from samestep.lane_tuning.choices import refuse_fixed_world

        refuse_fixed_world(loaded, detect_launch(process_environment()).world)
        if write is not None:
            refuse_layer(write)
        request = Request(loaded, file, tuple(overrides or ()), quick, rounds, steps)
        hardware = quick_hardware(process_environment())
        found = find_advice(request, hardware, lambda line: typer.echo(line, err=True))
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
    from samestep.errors import PlanError
    from samestep.starter import write_starter

    if write is not None:
        raise PlanError("--write includes a config, and none is given: samestep advise CONFIG")
    with TemporaryDirectory(prefix="samestep-advise-") as folder:
        write_starter(Path(folder))
        yield Path(folder) / "config.yaml"


def _measure_as_rank(
    config: Config,
    context: typer.Context,
    local_rank: int | None,
    variants: str,
    length: tuple[int, int | None],
    result: Path,
) -> None:
    from samestep.advise.plan import from_text

    tried = from_text(variants)
    with as_rank(config, context, local_rank, needs_lanes=False) as place:
        from samestep.advise.measure import measure_variants

        found = measure_variants(config, place, tried, *length)
    if place.is_main:
        found.write(result)


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
    write_layer(path, config, "samestep advise", settings)
    typer.echo(f"Config: {path}, which includes {config}", err=True)
