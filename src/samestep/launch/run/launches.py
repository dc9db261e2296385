"""Starts the ranks of a launch, and stays with them to their end."""

from __future__ import annotations

import sys
from collections.abc import Callable

from samestep.environment.variables import process_environment
from samestep.launch.commands.mpirun import ProgramCommand
from samestep.launch.commands.slurm import SlurmJob
from samestep.launch.commands.ssh import SshCommands
from samestep.launch.commands.torchrun import TorchrunCommand
from samestep.launch.run.held_job import run_held
from samestep.launch.run.mpirun import run_mpirun
from samestep.launch.run.slurm import cancel, follow_job, submit
from samestep.launch.run.ssh import run_over_ssh

Report = Callable[[str], None]
Launch = TorchrunCommand | ProgramCommand | SshCommands | SlurmJob
"""The ranks of a config, ready to be started by one launcher."""


def start(launch: Launch, report: Report, *, follow: bool = False, quiet: bool = False, held: bool = False) -> None:
    """Start the ranks and wait for their end; raises what their end means.

    Args:
        launch: What is started.
        report: Gets a line for whatever a person should know meanwhile.
        follow: Also wait for the end of a job that a batch system runs.
        quiet: Keep the ranks' own output off the terminal.
        held: End a job with this command, which may be one of many.
    """
    if isinstance(launch, SshCommands):
        return run_over_ssh(launch)
    if isinstance(launch, SlurmJob):
        return run_held(launch, report) if held else _submit(launch, report, follow, quiet)
    section = launch.rank_command.config.launch
    if section.modules or section.before:
        report(
            "launch.modules and launch.before only apply to scripts and are skipped here: run them "
            "yourself first, or save the script with --write and run that"
        )
    if isinstance(launch, ProgramCommand):
        return run_mpirun(launch, process_environment(), quiet)
    from samestep.launch.run.agent import run_ranks  # imports torch, which the others do not need

    run_ranks(launch, report, quiet)


def _submit(job: SlurmJob, report: Report, follow: bool, quiet: bool) -> None:
    submitted, run = submit(job), job.folder.parent
    report(f"submitted job {submitted.job}; its output: {job.folder}; samestep show {run}")
    if not follow:
        return
    try:
        follow_job(run, submitted, report, None if quiet else sys.stdout)
    except KeyboardInterrupt:
        if quiet:
            cancel(submitted)  # nobody else knows of a job that is not for a person to see
        raise
