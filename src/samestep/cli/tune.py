"""`samestep tune`: measures which settings suit a training on this machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from samestep.cli.app import (
    MODELS,
    AsJson,
    Commands,
    ConfigFile,
    Launched,
    LocalRank,
    Overrides,
    app,
    guarded,
    print_rows,
    refuse_outputs,
    reporting,
    usable,
)
from samestep.cli.bench.shared import Hosts, Nodes, Page, Start, ViaOption, Worlds, print_presentation
from samestep.cli.ranks import as_rank
from samestep.distributed.signals import DeferredSignals
from samestep.environment.variables import process_environment
from samestep.errors import NO_SUGGESTION, MissingExtraError, OutputError, RunDirError

if TYPE_CHECKING:
    from samestep.bench.tuning.lr_range_test import RangeTestResult
    from samestep.bench.tuning.recommend import Advised
    from samestep.config import Config


@dataclass(frozen=True)
class Setting:
    """A key that a layer sets."""

    key: str
    value: Any
    remarks: Sequence[str] = ()
    """Lines above it."""


def refuse_layer(path: Path) -> None:
    """Refuse a file that is there, or no config; before the work of a command."""
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise OutputError(f"{path}: a config is written there: end its name in .yaml")
    if path.exists() or path.is_symlink():
        raise OutputError(f"{path} exists already, and is kept: name another file")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: there is no directory {path.parent}")


def write_layer(path: Path, config: Path, command: str, settings: Sequence[Setting]) -> None:
    """Write it."""
    from samestep.checkpoint.files import write_whole

    refuse_layer(path)
    below = os.path.relpath(config.resolve(), path.parent.resolve())
    lines = [
        f"# Recommended by {command}, {time.strftime('%Y-%m-%d')}. Measure again on other machines.",
        f"include: {json.dumps(below)}",
    ]
    for one in settings:
        lines += ["", *(f"# {' '.join(remark.split())}" for remark in one.remarks), _line(one)]
    try:
        write_whole(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None


def _line(setting: Setting) -> str:
    first, *inside = setting.key.split(".")
    value = setting.value
    for name in reversed(inside):
        value = {name: value}
    return f"{first}: {json.dumps(value)}"


tune_app = typer.Typer(
    cls=Commands, help="Measure which settings suit a training on this machine.", no_args_is_help=True
)
app.add_typer(tune_app, name="tune", rich_help_panel=MODELS)

Rounds = Annotated[int, typer.Option(min=1, help="Rounds per choice; a range needs 4.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Timed steps per turn; about a second's, if not given.")]


@tune_app.command(hidden=True)
def measure(
    context: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    variants: Annotated[str, typer.Option()] = "[]",
    rounds: Rounds = 5,
    steps: Steps = None,
    result: Annotated[Path, typer.Option()] = Path("result.json"),
    local_rank: LocalRank = None,
    launched: Launched = False,
) -> None:
    """Time variants of a config as a rank; what `samestep tune` starts."""
    with guarded(launched), DeferredSignals():
        from samestep.bench.tuning.variants import from_text
        from samestep.config import load_config

        loaded, tried = load_config(config, overrides or []), from_text(variants)
        with as_rank(loaded, context, local_rank, needs_lanes=False) as place:
            from samestep.bench.tuning.timing import time_variants

            found = time_variants(loaded, place, tried, rounds, steps)
        if place.is_main:
            found.write(result)


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
        from samestep.bench.tuning.recommend import TuneRequest, tune_all
        from samestep.config import load_config
        from samestep.distributed.quick_hardware import quick_hardware

        loaded = load_config(file, overrides or [])
        if quick and steps is None:
            steps = _QUICK_STEPS
        if write is not None:
            refuse_layer(write)
        with reporting() as line:
            request = TuneRequest(loaded, file, tuple(overrides or ()), quick, rounds, steps, report=line)
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
    advice = [(one.topic, one.text) for one in found.advice]
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
        Setting(key, value, [f"{one.topic}: {one.text}", *([_ANOTHER] if one.another_run else [])])
        for one in found.advice
        for key, value in one.overrides.items()
    ]
    write_layer(path, config, "samestep tune all", settings)
    typer.echo(f"Config: {path}, which includes {config}", err=True)


Lanes = Annotated[str, typer.Option(help="Numbers of lanes; 1,2,4,8,16 and the config's own, if not given.")]
Parallel = Annotated[str, typer.Option(help="On GPUs: lanes side by side, such as 1,4,8; as configured, if not given.")]


@tune_app.command()
def lanes(
    config: ConfigFile,
    overrides: Overrides = None,
    lanes: Lanes = "",
    parallel: Parallel = "",
    worlds: Worlds = "1",
    via: ViaOption = "torchrun",
    nodes: Nodes = 1,
    hosts: Hosts = "",
    rounds: Rounds = 5,
    steps: Steps = None,
    as_json: AsJson = False,
    report: Page = None,
) -> None:
    """Measure what lanes cost, and recommend how many.

    Trains for some seconds with each number of lanes; saves nothing.

    Example: samestep tune lanes config.yaml --worlds 1,2
    """
    with guarded(), DeferredSignals():
        from samestep.bench.tuning.recommend import TuneRequest, tune_lanes
        from samestep.config import load_config
        from samestep.launch.run.worlds import parse_counts

        wanted = parse_counts(lanes, "--lanes") if lanes else ()
        widths = parse_counts(parallel, "--parallel") if parallel else ()
        start = Start.parse(worlds, via, nodes, hosts)
        loaded = load_config(config, overrides or [])
        refuse_outputs(report)
        with reporting() as line:
            request = TuneRequest(loaded, config, tuple(overrides or ()), rounds=rounds, steps=steps, report=line)
            costs, document = tune_lanes(request, wanted, widths, start.worlds, start.machines)
        shown = costs.present(f"{loaded.name}: what lanes cost", document.machine["device"])
        if as_json:
            typer.echo(json.dumps(costs.as_json()))
        else:
            print_presentation(shown)
        if report is not None:
            from samestep.bench.presentation import write_html
            from samestep.report.run_facts import config_fact

            write_html(replace(document, machine={**document.machine, **config_fact(loaded)}), shown, report)
            typer.echo(f"Page: {report}", err=True)


Rule = Literal["steepest", "valley"]
"""The suggestion that --write writes."""


@tune_app.command()
def lr(
    context: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    smallest: Annotated[float, typer.Option("--from", help="The first step's rate.")] = 1e-7,
    largest: Annotated[float, typer.Option("--to", help="The last step's rate.")] = 10.0,
    steps: Annotated[int, typer.Option(help="Number of steps, the first and the last included.")] = 100,
    smooth: Annotated[float, typer.Option(help="Share of the newest loss in the smoothed one.")] = 0.05,
    stop_factor: Annotated[float, typer.Option(help="Stop at this many times the lowest smoothed loss.")] = 4.0,
    suggest: Annotated[Rule, typer.Option(help="The suggestion to write.")] = "valley",
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A new config with it, which includes this one.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="The rate's key: optimizer.lr or params.lr, if not given.")] = None,
    as_json: AsJson = False,
    report: Annotated[Path | None, typer.Option(help="Where the HTML page goes.")] = None,
    local_rank: LocalRank = None,
) -> None:
    """Find a learning rate; alone, or as a rank of any launcher.

    Exits 8 if the losses suggest none.

    Example: samestep tune lr config.yaml --from 1e-5 --to 1 --write tuned.yaml
    """
    with guarded(), DeferredSignals():
        from samestep.bench.tuning.lr_suggestion import RangeTest
        from samestep.config import load_config

        test = RangeTest(smallest, largest, steps, smooth, stop_factor)
        loaded = load_config(config, overrides or [])
        refuse_outputs(report)
        if write is not None:
            refuse_layer(write)
        with as_rank(loaded, context, local_rank) as place:
            from samestep.bench.tuning.lr_range_test import Target, find_lr

            target = None if write is None else Target(config, overrides or [])
            found = find_lr(loaded, place, test, key, target)
        if not place.is_main:
            # With another exit code than 0, a launcher would end rank 0 in the middle of the rest.
            return
        written = None
        if write is not None and not found.wrong:
            written = _write_rate(found, config, write, suggest)
        _show(found, written, as_json)
        if written:
            _remind_of_groups(found, loaded, written["value"])
        _keep(found, loaded, written, report)
    if found.wrong:
        raise typer.Exit(NO_SUGGESTION)


def _write_rate(found: RangeTestResult, config: Path, file: Path, rule: str) -> dict[str, Any]:
    assert found.key is not None, "checked before the first step"
    rate = found.suggestions[rule]
    remark = f"{rule}; it was {found.rate_now:.3g}"
    write_layer(file, config, "samestep tune lr", [Setting(found.key, rate, [remark])])
    return {"file": str(file), "key": found.key, "rule": rule, "value": rate}


def _remind_of_groups(found: RangeTestResult, config: Config, rate: float) -> None:
    groups = [] if config.optimizer is None else config.optimizer.groups
    if found.key == "optimizer.lr" and any(group.lr is not None for group in groups):
        typer.echo(
            "optimizer.groups have their own rates, which kept their ratio to optimizer.lr in "
            f"the test: multiply them by {rate / found.rate_now:.3g} to keep it",
            err=True,
        )


def _show(found: RangeTestResult, written: dict[str, Any] | None, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**found.as_json(), "written": written}))
        return
    if found.wrong:
        typer.echo(f"No suggestion: {found.wrong}.")
        return
    rows = [(rule, f"{rate:.3g}", f"{rate / found.rate_now:.3g} times") for rule, rate in found.suggestions.items()]
    print_rows(("rule", found.key or "learning rate", f"of {found.rate_now:.3g} now"), rows)
    if written:
        typer.echo(f"Config: {written['file']}, with {written['key']}: {written['value']:.3g}")


def _keep(found: RangeTestResult, config: Config, written: dict[str, Any] | None, page: Path | None) -> None:
    """Write the numbers and the plots to the test's directory."""
    from samestep.bench.tuning.lr_report import write_html, write_png
    from samestep.report.run_facts import run_facts

    title = f"{config.name}: loss over learning rate"
    document = json.dumps({**found.as_json(), "written": written}, indent=1)
    numbers, picture = found.folder / "tune-lr.json", found.folder / "tune-lr.png"
    page = page or found.folder / "tune-lr.html"
    _write_file("Numbers", numbers, lambda: numbers.write_text(document, encoding="utf-8"))
    _write_file("Plot", picture, lambda: write_png(found, title, picture))
    _write_file("Page", page, lambda: write_html(found, title, page, run_facts(found.folder)))


def _write_file(name: str, path: Path, write: Callable[[], object]) -> None:
    try:
        write()
        typer.echo(f"{name}: {path}", err=True)
    except MissingExtraError as error:
        typer.echo(f"No {name.lower()}: {error}", err=True)
    except OSError as error:
        raise RunDirError(f"{path} could not be written: {error.strerror or error}") from None
