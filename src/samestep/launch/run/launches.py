"""Launches: the text of a command together with what starts it and stays with it to its end."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from samestep.environment.variables import process_environment
from samestep.launch.commands.launch_command import LaunchCommand
from samestep.launch.commands.mpirun import MpirunCommand
from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.commands.slurm import SlurmJob
from samestep.launch.commands.srun import HIDDEN, SrunCommand
from samestep.launch.commands.ssh import SshCommands
from samestep.launch.commands.summary import Rows
from samestep.launch.commands.torchrun import TorchrunCommand
from samestep.launch.run.held_job import run_held
from samestep.launch.run.mpirun import run_mpirun
from samestep.launch.run.slurm import cancel, follow_job, submit
from samestep.launch.run.ssh import run_over_ssh

Report = Callable[[str], None]


@dataclass(frozen=True)
class Launch(ABC):
    """The ranks of a config, ready to be started by one launcher."""

    command: LaunchCommand
    is_queued: ClassVar[bool] = False
    """Whether `run` only hands the ranks to a batch system, unless it is to follow them."""

    def script(self) -> str:
        """Return a shell script that does the same."""
        return self.command.script()

    def summary(self) -> Rows:
        """Return what it amounts to, for a person to read before it starts."""
        return self.command.summary()

    @abstractmethod
    def run(self, report: Report, *, follow: bool = False, quiet: bool = False) -> None:
        """Start the ranks and wait for their end; raises what their end means.

        Args:
            report: Gets a line for whatever a person should know meanwhile.
            follow: Also wait for the end of a job that a batch system runs.
            quiet: Keep the ranks' own output off the terminal.
        """

    def run_held(self, report: Report) -> None:
        """The same for a launch that must end with this command, which may be one of many."""
        self.run(report)


@dataclass(frozen=True)
class TorchrunLaunch(Launch):
    command: TorchrunCommand

    def run(self, report: Report, *, follow: bool = False, quiet: bool = False) -> None:
        from samestep.launch.run.agent import run_ranks  # imports torch, which the others do not need

        _warn_of_skipped_setup(self.command.rank_command, report)
        run_ranks(self.command, report, quiet)


@dataclass(frozen=True)
class MpirunLaunch(Launch):
    command: MpirunCommand

    def run(self, report: Report, *, follow: bool = False, quiet: bool = False) -> None:
        _warn_of_skipped_setup(self.command.rank_command, report)
        run_mpirun(self.command, process_environment(), quiet)


@dataclass(frozen=True)
class SrunLaunch(Launch):
    command: SrunCommand

    def run(self, report: Report, *, follow: bool = False, quiet: bool = False) -> None:
        _warn_of_skipped_setup(self.command.rank_command, report)
        environ = {k: v for k, v in process_environment().items() if k not in HIDDEN}
        run_mpirun(self.command, environ, quiet)


@dataclass(frozen=True)
class SshLaunch(Launch):
    command: SshCommands

    def run(self, report: Report, *, follow: bool = False, quiet: bool = False) -> None:
        run_over_ssh(self.command)


@dataclass(frozen=True)
class SlurmLaunch(Launch):
    command: SlurmJob
    is_queued: ClassVar[bool] = True

    def run(self, report: Report, *, follow: bool = False, quiet: bool = False) -> None:
        job, folder = submit(self.command), self.command.folder
        run = folder.parent
        report(f"submitted job {job.job}; its output: {folder}; samestep show {run}")
        if not follow:
            return
        try:
            follow_job(run, job, report, None if quiet else sys.stdout)
        except KeyboardInterrupt:
            if quiet:
                cancel(job)  # nobody else knows of a job that is not for a person to see
            raise

    def run_held(self, report: Report) -> None:
        run_held(self.command, report)


def _warn_of_skipped_setup(rank_command: RankCommand, report: Report) -> None:
    section = rank_command.config.launch
    if section.modules or section.before:
        report(
            "launch.modules and launch.before only apply to scripts and are skipped here: run them "
            "yourself first, or save the script with --write and run that"
        )
