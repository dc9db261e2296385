"""The commands on runs that exist: runs, resume, stop."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from samestep.cli.app import RUNS, TRAINING, AsJson, Overrides, RunDirPath, Trust, app, guarded, print_rows, usable
from samestep.cli.show import status_of, text_of
from samestep.errors import CheckpointError, LaunchError, RunDirError


@app.command(rich_help_panel=RUNS)
def runs(
    folder: Annotated[Path, typer.Argument(callback=usable, help="Where runs are.", metavar="FOLDER")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs of a folder, the newest last.

    Example: samestep runs
    """
    with guarded():
        from samestep.checkpoint.run_result import RESULT, read_result
        from samestep.cli.ui.folders import find_folders

        if not folder.is_dir():
            raise RunDirError(f"there is no folder {folder}: name the one that your runs are in")
        found: list[dict[str, Any]] = []
        for run in sorted(find_folders(folder, _warn).runs, key=lambda run: (run / RESULT).stat().st_mtime):
            try:
                result = read_result(run)
            except CheckpointError as error:
                typer.echo(f"samestep: {error}", err=True)
                continue
            if result is not None:
                written = (run / RESULT).stat().st_mtime
                status = status_of(run, result)
                found.append({"run": str(run), **result.as_json(), "status": status, "written": written})
        if as_json:
            from samestep.report.chart import finite

            typer.echo(json.dumps(finite({"runs": found}), allow_nan=False))
        elif not found:
            typer.echo(f"no runs in {folder}")
        else:
            header = ("run", "status", "steps", "ranks", "loss", "best", "written")
            print_rows(header, [_run_row(one) for one in found])


def _warn(line: str) -> None:
    typer.echo(f"samestep: {line}", err=True)


def _run_row(one: dict[str, Any]) -> tuple[Any, ...]:
    best = one["best"] or {}
    shown = f"{best['metric']} {text_of(best['value'])}, step {best['step']}" if best else ""
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["written"]))
    return (one["run"], one["status"], one["steps"], one["world"], text_of(one["loss"]), shown, written)


@app.command(rich_help_panel=TRAINING)
def resume(run: RunDirPath, overrides: Overrides = None, trust: Trust = False) -> None:
    """Resume a run with the config, the overrides and the launcher that it was started with.

    Example: samestep resume runs/digits epochs=20
    """
    with guarded():
        words = _words(run, overrides or [], trust)
    typer.main.get_command(app).main(words, prog_name="samestep")


def _words(run: Path, overrides: list[str], trust: bool) -> list[str]:
    """Return the command that started the run, for its directory; the process is then where it was typed."""
    from samestep.run.origin import Origin, refuse_untrusted_command, refuse_untrusted_task
    from samestep.run.run_dir import config_of

    config = config_of(run, overrides)
    origin = Origin.read(run)
    if origin is None or origin.command is None:
        raise LaunchError(
            f"{run} does not record a samestep command that started it: start it again as before, or "
            f"with: samestep launch {run / 'config.json'} --nproc N"
        )
    command = origin.command
    words = command.again(run, overrides)
    if not trust:
        refuse_untrusted_command(run, origin, words)
        refuse_untrusted_task(run, config, overrides, trust)
    try:
        os.chdir(command.folder)
    except OSError as error:
        raise LaunchError(
            f"{run} was started in {command.folder}, which cannot be entered: {error.strerror or error}"
        ) from None
    return words


@app.command(rich_help_panel=TRAINING)
def stop(
    path: Annotated[str, typer.Argument(callback=usable, help="A run's directory, or a sweep.", metavar="RUN|SWEEP")],
) -> None:
    """Stop a run's Slurm job, or a sweep wherever it runs; it saves first, and can be resumed.

    Example: samestep stop runs/digits
    """
    with guarded():
        from samestep.launch.run.slurm import cancel, newest_job, state_of
        from samestep.sweep.study_folder import STOP, sweep_folder

        folder = sweep_folder(path)
        if folder is not None:
            (folder / STOP).touch()
            typer.echo(f"requested; samestep sweep run {folder} continues it")
            return
        if not Path(path).is_dir():
            raise RunDirError(f"there is no run and no sweep {path}")
        job = newest_job(Path(path))
        state = state_of(job.job)
        if state.is_final:
            typer.echo(f"job {job.job} has already ended: {state.state}")
            return
        cancel(job)
        typer.echo(f"job {job.job} is cancelled; it was {state.state}")
