"""The command that shows a run, a sweep or a config: show."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.cli.app import RUNS, AsJson, Overrides, app, guarded, print_rows, usable
from samestep.errors import LaunchError, PlanError, RunDirError

if TYPE_CHECKING:
    from samestep.checkpoint.listing import FoundCheckpoint
    from samestep.checkpoint.run_result import RunResult
    from samestep.launch.run.slurm import JobState

_EXIT_CODES = {"finished": 0, "stopped_early": 0, "failed": 1}
"""As the run's own command ends; 75 where something is left to train."""


@app.command(rich_help_panel=RUNS)
def show(
    path: Annotated[
        str, typer.Argument(callback=usable, help="A run's directory, a sweep, or a config.", metavar="PATH")
    ],
    overrides: Overrides = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte of a run's checkpoints.")] = False,
    log: Annotated[bool, typer.Option("--log", help="Print what the run's newest Slurm job has written.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="With --log: until it ends.")] = False,
    as_json: AsJson = False,
    trust: Annotated[bool, typer.Option("--trust", help="Connect to a database that a sweep of others names.")] = False,
) -> None:
    """Show a run, a sweep or a config, also while it runs.

    Of a run: its result, checkpoints, times and Slurm jobs. Exits 0 if it is done, 75 if not yet, and 1 if it
    failed or a checkpoint cannot be used. Of a sweep: its trials, the best marked. Of a config: each value and
    where it comes from.

    Example: samestep show runs/digits
    """
    with guarded():
        from samestep.sweep.study_folder import sweep_folder

        place = Path(path)
        code = 0
        folder = None if place.is_file() else sweep_folder(path)
        _refuse_options(
            place.is_file(), folder is not None, overrides, {"verify": verify, "log": log, "follow": follow}
        )
        if place.is_file():
            _show_config(place, overrides or [], as_json)
        elif folder is not None:
            from samestep.cli.sweep import show_sweep

            show_sweep(folder, as_json, trust)
        elif not place.is_dir():
            raise RunDirError(f"there is no run, sweep or config {path}")
        elif log:
            _print_log(place, follow)
        else:
            code = _show_run(place, verify, as_json)
    raise typer.Exit(code)


def _refuse_options(is_config: bool, is_sweep: bool, overrides: list[str] | None, options: dict[str, bool]) -> None:
    """Refuse what would do nothing."""
    given = [f"--{name}" for name, is_given in options.items() if is_given]
    if (is_config or is_sweep) and given:
        raise PlanError(f"{', '.join(given)}: this is for a run's directory")
    if overrides and not is_config:
        raise PlanError(f"{overrides[0]}: values are for a config")
    if options["follow"] and not options["log"]:
        raise PlanError("--follow goes with --log")


def _show_config(file: Path, overrides: list[str], as_json: bool) -> None:
    from samestep.cli.describe import describe_config

    rows = describe_config(file, overrides)
    if as_json:
        values = {key: {"value": value, "origin": origin, "reason": reason} for key, value, origin, reason in rows}
        typer.echo(json.dumps(values))
    else:
        print_rows(("key", "value", "origin", "reason"), rows)


def _print_log(run: Path, follow: bool) -> None:
    from samestep.launch.run.slurm import follow_job, logs_of, newest_job

    job = newest_job(run)
    if follow:
        follow_job(run, job, lambda line: typer.echo(f"samestep: {line}", err=True), sys.stdout)
        return
    for path in logs_of(run, job):
        typer.echo(path.read_text(encoding="utf-8", errors="replace"), nl=False)


def _show_run(run: Path, verify: bool, as_json: bool) -> int:
    """Print everything about a run; return the exit code."""
    from samestep.checkpoint.listing import list_checkpoints
    from samestep.checkpoint.run_result import read_result
    from samestep.run.time_report import read_times

    result, (jobs, unknown) = read_result(run), _jobs(run)
    begun = any((run / name).exists() for name in ("checkpoints", "metrics.jsonl"))
    if result is None and not jobs and not begun:
        raise RunDirError(unknown or f"{run} holds no result.json: give the directory of a run that has begun")
    # A job that waits in the queue has no result yet.
    known = {} if result is None else {**result.as_json(), "status": status_of(run, result)}
    checkpoints, times = list_checkpoints(run / "checkpoints", checksums=verify), read_times(run)
    marks = checkpoint_marks(checkpoints)
    if as_json:
        document = {
            "run": str(run),
            "result": known or None,
            "checkpoints": [_as_json(item, marks) for item in checkpoints],
            "times": times,
            "jobs": [asdict(job) for job in jobs],
        }
        from samestep.report.chart import finite

        typer.echo(json.dumps(finite(document), allow_nan=False))
    else:
        print_rows(("run", str(run)), [(key, text_of(value)) for key, value in known.items()])
        _print_checkpoints(checkpoints, marks, verify)
        if times:
            print_rows(("time", "median", "worst", "unit"), _time_rows(times))
        if jobs:
            header = ("job", "state", "reason", "nodes", "elapsed", "restarts", "exit code")
            print_rows(header, [tuple(asdict(job).values()) for job in jobs])
    if unknown:
        typer.echo(f"Slurm jobs are not shown: {unknown}", err=True)
    if any(item.wrong for item in checkpoints):
        return 1
    if result is None and jobs and jobs[-1].is_final and jobs[-1].state != "COMPLETED":
        return 1  # it ended before the run began
    return _EXIT_CODES.get(str(known.get("status")), 75)


def status_of(run: Path, result: RunResult) -> str:
    """Return the status of a run; `killed` if the process that left `running` is gone."""
    from samestep.run.run_dir import was_killed

    return "killed" if result.status == "running" and was_killed(run) else result.status


def _jobs(run: Path) -> tuple[list[JobState], str]:
    """Return the states of a run's Slurm jobs, the newest last, and why they are not known."""
    from samestep.launch.run.slurm import jobs_of, state_of

    found, unknown = [], ""
    for job in jobs_of(run):
        try:
            found.append(state_of(job.job))
        except LaunchError as error:  # a run may be looked at where there is no Slurm
            unknown = str(error)
    return found, unknown


def checkpoint_marks(found: Sequence[FoundCheckpoint]) -> dict[int, str]:
    """Return which steps are the last, and the best, of those that can be used."""
    usable = [item for item in found if item.manifest is not None]
    if not usable:
        return {}
    last = usable[-1]
    marks = {last.step: "last"}
    best = last.manifest.best if last.manifest is not None else None
    if best is not None:
        marks[best.step] = "best, last" if best.step == last.step else "best"
    return marks


def _print_checkpoints(found: list[FoundCheckpoint], marks: dict[int, str], verified: bool) -> None:
    if found:
        header = ("checkpoint", "epoch", "written", "ranks", "MB", "metrics", "mark", "state")
        rows = [checkpoint_row(item, marks, verified) for item in found]
        best = [at for at, item in enumerate(found) if "best" in marks.get(item.step, "")]
        print_rows(header, rows, best=best)


def checkpoint_row(item: FoundCheckpoint, marks: dict[int, str], verified: bool) -> tuple[Any, ...]:
    """Return a checkpoint in a row of a table; the last value is its state."""
    size = f"{item.size / 1e6:.3g}"
    if item.manifest is None:
        return (item.step, "", "", "", size, "", "", f"NOT valid: {item.wrong}")
    manifest = item.manifest
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
    metrics = "  ".join(
        f"{name} {value:.4g}" for name, value in manifest.metrics.items() if isinstance(value, (int, float))
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


def text_of(value: Any) -> str | None:
    """Return a value of a result in a few characters."""
    if isinstance(value, dict):
        return "  ".join(f"{name} {text_of(inner)}" for name, inner in value.items())
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
"""The name of each value, its unit, and the factor to that unit."""


def _time_rows(summary: dict[str, Any]) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for key, (name, unit, scale) in _TIMES.items():
        if key in summary:
            median, worst = (f"{summary[key][which] * scale:,.4g}" for which in ("median", "worst"))
            rows.append((name, median, worst, unit))
    if "slowest_rank" in summary:
        rows.append(("slowest rank, most often", f"rank {summary['slowest_rank']}", "", ""))
    return rows
