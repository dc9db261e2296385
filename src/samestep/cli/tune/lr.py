"""The command that looks for a learning rate: tune lr."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.cli.app import AsJson, ConfigFile, LocalRank, Overrides, guarded, print_rows
from samestep.cli.config_layer import Setting, refuse_layer, write_layer
from samestep.cli.ranks import as_rank
from samestep.cli.tune.shared import tune_app
from samestep.distributed.signals import DeferredSignals
from samestep.errors import NO_SUGGESTION, MissingExtraError, RunDirError

if TYPE_CHECKING:
    from samestep.bench.tuning.lr_range_test import RangeTestResult
    from samestep.config import Config


class Rule(str, Enum):
    """The suggestion that --write writes."""

    steepest = "steepest"
    valley = "valley"


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
    suggest: Annotated[Rule, typer.Option(help="The suggestion to write.")] = Rule.valley,
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
        from samestep.bench.tuning.lr_curve import RangeTest
        from samestep.config import load_config

        test = RangeTest(smallest, largest, steps, smooth, stop_factor)
        loaded = load_config(config, overrides or [])
        if report is not None:
            from samestep.report.page import refuse_other_file

            refuse_other_file(report)
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
            written = _write(found, config, write, suggest.value)
        _show(found, written, as_json)
        if written:
            _remind_of_groups(found, loaded, written["value"])
        _keep(found, loaded, written, report)
    if found.wrong:
        raise typer.Exit(NO_SUGGESTION)


def _write(found: RangeTestResult, config: Path, file: Path, rule: str) -> dict[str, Any]:
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
