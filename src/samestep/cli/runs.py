"""The commands that read a run's directory: result, checkpoints, times."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from samestep.cli.app import RUNS, AsJson, Force, RunDirPath, app, guarded, print_rows, usable

if TYPE_CHECKING:
    from samestep.checkpoint.listing import FoundCheckpoint


class _ListByDefault(TyperGroup):
    """`checkpoints RUN` is `checkpoints list RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["list", *args]
        return super().parse_args(ctx, args)


checkpoints_app = typer.Typer(
    help="List a run's checkpoints, or export one.", no_args_is_help=True, cls=_ListByDefault
)
app.add_typer(checkpoints_app, name="checkpoints", rich_help_panel=RUNS)


@checkpoints_app.command("list")
def list_command(
    run: RunDirPath,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte again.")] = False,
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints; exits 1 if one of them cannot be used.

    `samestep checkpoints RUN` is short for this.
    """
    with guarded():
        from samestep.checkpoint.listing import list_checkpoints
        from samestep.errors import CheckpointError

        folder = run / "checkpoints"
        if not folder.is_dir():
            raise CheckpointError(f"{run} holds no checkpoints: give a run's directory")
        found = list_checkpoints(folder, checksums=verify)
        marks = _marks(found)
        if as_json:
            typer.echo(json.dumps([_as_json(item, marks) for item in found]))
        else:
            header = ("step", "epoch", "written", "ranks", "MB", "metrics", "", "state")
            print_rows(header, [_row(item, marks, verify) for item in found])
    if any(item.wrong for item in found):
        raise typer.Exit(1)


def _marks(found: list[FoundCheckpoint]) -> dict[int, str]:
    """Which steps are the last, and the best, of those that can be used."""
    usable = [item for item in found if item.manifest is not None]
    if not usable:
        return {}
    last = usable[-1]
    marks = {last.step: "last"}
    best = last.manifest.best if last.manifest is not None else None
    if best is not None:
        marks[best.step] = "best, last" if best.step == last.step else "best"
    return marks


def _row(item: FoundCheckpoint, marks: dict[int, str], verified: bool) -> tuple[Any, ...]:
    size = f"{item.size / 1e6:.3g}"
    if item.manifest is None:
        return (item.step, "", "", "", size, "", "", f"NOT valid: {item.wrong}")
    manifest = item.manifest
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
    metrics = "  ".join(
        f"{name} {value:.4g}"
        for name, value in manifest.metrics.items()
        if isinstance(value, (int, float))
    )
    state = "valid, every byte" if verified else "valid"
    mark = marks.get(item.step, "")
    return (item.step, manifest.epoch, written, manifest.world, size, metrics, mark, state)


def _as_json(item: FoundCheckpoint, marks: dict[int, str]) -> dict[str, Any]:
    mark = marks.get(item.step, "")
    known = {} if item.manifest is None else asdict(item.manifest)
    return {
        **known,
        "path": str(item.folder),
        "step": item.step,
        "bytes": item.size,
        "valid": not item.wrong,
        "wrong": item.wrong or None,
        "is_best": "best" in mark,
        "is_last": "last" in mark,
    }


@checkpoints_app.command()
def export(
    run: RunDirPath,
    to: Annotated[Path, typer.Argument(callback=usable, help="The file to write.", metavar="FILE")],
    which: Annotated[str, typer.Option(help="best, last, or the number of a step.")] = "best",
    weights: Annotated[str, typer.Option(help="raw, ema, swa or average.")] = "raw",
    extra: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Another key: YAML, or @FILE for a file of it; may be repeated.",
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Write {"model_state_dict", "optimizer_state_dict", "epoch"} for other projects to read."""
    with guarded():
        from samestep.checkpoint.torch_file import write_torch_file

        further = dict(map(_extra_key, extra or []))
        manifest = write_torch_file(run, which, to, force, weights, further)
        typer.echo(f"wrote step {manifest.step} of {run}, {weights} weights, to {to}")


def _extra_key(text: str) -> tuple[str, Any]:
    """`KEY=VALUE` as the key and the value."""
    from samestep.errors import LaunchError, TextError
    from samestep.parsing.files import read_text
    from samestep.parsing.plain_yaml import parse_yaml

    key, equals, value = text.partition("=")
    if not key or not equals:
        raise LaunchError(f"--extra is {text!r}: write KEY=VALUE, or KEY=@FILE")
    try:
        return key, parse_yaml(read_text(Path(value[1:])) if value.startswith("@") else value)
    except TextError as error:
        raise LaunchError(f"--extra {key}: {value} {error}") from None


@app.command(rich_help_panel=RUNS)
def times(run: RunDirPath, as_json: AsJson = False) -> None:
    """Show where a run's time went, and which rank the others waited for."""
    with guarded():
        from samestep.train.time_report import read_times

        summary = read_times(run)
        if as_json:
            typer.echo(json.dumps(summary))
        else:
            print_rows(("", "median", "worst", "unit"), _time_rows(summary))


_EXIT_CODES = {"finished": 0, "stopped_early": 0, "failed": 1}
"""As the run's own command ends; 75 where something is left to train."""


@app.command(rich_help_panel=RUNS)
def result(run: RunDirPath, as_json: AsJson = False) -> None:
    """Show what a run has come to; exits 0 if it is done, 75 if not yet, 1 if it failed."""
    with guarded():
        from samestep.checkpoint.run_result import read_result
        from samestep.errors import CheckpointError
        from samestep.train.run_dir import was_killed

        found = read_result(run)
        if found is None:
            raise CheckpointError(
                f"{run} holds no result.json: give the directory of a run that has begun"
            )
        status = "killed" if found.status == "running" and was_killed(run) else found.status
        shown = {"run": str(run), **found.as_json(), "status": status}
        if as_json:
            typer.echo(json.dumps(shown))
        else:
            print_rows(("", "result"), [(key, _text(value)) for key, value in shown.items()])
    raise typer.Exit(_EXIT_CODES.get(status, 75))


def _text(value: Any) -> str | None:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_text(inner)}" for name, inner in value.items())
    if value is None:
        return None
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_TIMES = {
    "samples_per_second": ("throughput", "samples/s", 1.0),
    "time_data": ("reading data", "ms/step", 1e3),
    "time_compute": ("computing", "ms/step", 1e3),
    "time_exchange": ("exchange between ranks", "ms/step", 1e3),
    "time_save": ("saving", "ms/step", 1e3),
    "rank_spread": ("work of the slowest rank", "x the fastest's", 1.0),
    "peak_memory_mb": ("peak memory", "MiB", 1.0),
}
"""What is measured: its name, its unit, and how many of that the value is."""


def _time_rows(summary: dict[str, Any]) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for key, (name, unit, scale) in _TIMES.items():
        if key in summary:
            median, worst = (f"{summary[key][which] * scale:,.4g}" for which in ("median", "worst"))
            rows.append((name, median, worst, unit))
    if "slowest_rank" in summary:
        rows.append(("slowest rank, most often", f"rank {summary['slowest_rank']}", "", ""))
    return rows
