"""The command that resumes a run as it was started: resume."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from samestep.cli.app import TRAINING, Overrides, RunDirPath, Trust, app, guarded
from samestep.errors import LaunchError


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
