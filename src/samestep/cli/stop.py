"""The command that stops a run's job, or a sweep: stop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samestep.cli.app import TRAINING, app, guarded, usable_name
from samestep.errors import RunDirError


@app.command(rich_help_panel=TRAINING)
def stop(
    path: Annotated[
        str, typer.Argument(callback=usable_name, help="A run's directory, or a sweep.", metavar="RUN|SWEEP")
    ],
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
