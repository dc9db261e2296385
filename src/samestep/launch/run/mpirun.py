"""Runs an mpirun or an srun, whose ranks print to this terminal, and reports how it ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from samestep.distributed.signals import SignalForwarder
from samestep.environment.secret import SECRET, new_secret
from samestep.errors import LaunchError, RankFailed, Stopped, code_of_ranks
from samestep.launch.commands.mpirun import Flavour, ProgramCommand, flavour_of
from samestep.launch.run.orphans import Reaper

_SECONDS_TO_ANSWER = 20.0
_SECONDS_TO_SAVE = 60.0
"""How long mpirun's ranks get to save if this process is killed; they end with mpirun."""
_KEPT_BYTES, _KEPT_LINES = 65536, 60
"""Output of a quiet one that is kept, and shown if it fails."""


_BY_NAME: dict[str, Flavour] = {
    "openmpi": "openmpi", "orterun": "openmpi", "prterun": "openmpi", "hydra": "hydra", "mpich": "hydra",
}  # fmt: skip


def find_flavour(mpirun: str, may_run: bool = True) -> Flavour:
    """Return which kind of mpirun this is; `LaunchError` explains what to do where there is none.

    Args:
        mpirun: The program's name or path.
        may_run: Whether it may be run to ask it: what only shows a launch runs nothing that a config names.
    """
    path = shutil.which(mpirun)
    if path is None:
        raise LaunchError(
            f"there is no {mpirun} here: load an MPI (module load openmpi), install one (Debian: "
            "openmpi-bin or mpich), or name it with launch.mpirun. MPI only starts the ranks: "
            "without one, --via ssh or --via torchrun does the same"
        )
    if not may_run and mpirun != "mpirun":
        known = Path(path).resolve().name
        for part, flavour in _BY_NAME.items():
            if part in known:
                return flavour
        raise LaunchError(
            f"launch.mpirun is {mpirun}, whose kind only shows when it runs, and --print runs nothing that a "
            "config names: name it by mpirun.openmpi or mpiexec.hydra, or launch without --print"
        )
    try:
        printed = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version does not answer: {error}") from None
    return flavour_of(printed.stdout + printed.stderr)


def run_mpirun(command: ProgramCommand, environ: Mapping[str, str], quiet: bool = False) -> None:
    """Start it and wait; a failing rank prints its own error meanwhile."""
    with TemporaryFile() if quiet else nullcontext() as kept:
        try:
            _run(command, environ, kept)
        except RankFailed:
            if kept is not None:
                sys.stderr.write(_last_lines(kept))
            raise


def _last_lines(kept: IO[bytes]) -> str:
    kept.seek(max(0, kept.seek(0, os.SEEK_END) - _KEPT_BYTES))
    return "".join(kept.read().decode(errors="replace").splitlines(keepends=True)[-_KEPT_LINES:])


def _run(command: ProgramCommand, environ: Mapping[str, str], output: IO[bytes] | None) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def stop(number: signal.Signals) -> None:
        announced = number == signal.SIGUSR1  # which every mpirun forwards, and may mean a requeue
        for process in started:
            process.send_signal(number if announced else signal.Signals[command.stops_by])

    def end() -> None:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.Signals[command.ends_by])

    with SignalForwarder(stop, end) as signals:
        try:
            process = subprocess.Popen(
                command.argv,
                env={
                    **{name: value for name, value in environ.items() if name not in command.hidden},
                    **command.variables,
                    SECRET: new_secret(),
                },
                cwd=command.rank_command.working_folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # we forward Ctrl-C to the ranks, once; mpirun would end
            )
        except OSError as error:
            raise LaunchError(f"{command.argv[0]} cannot be started here: {error.strerror or error}") from None
        started.append(process)
        if signals.received is not None:  # while it was being started
            end()
        with closing(Reaper(_SECONDS_TO_SAVE)) as reaper:
            reaper.watch(process.pid, signal.Signals[command.stops_by])
            code = process.wait()
            reaper.forget(process.pid)
    if code == 0:
        return
    if code == Stopped.exit_code:
        raise Stopped("the ranks have saved and stopped")
    how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    logs = command.rank_command.config.run_path / "logs"
    if signals.received is not None:
        # The ranks may have saved nevertheless: where they requeue their Slurm job, that ends mpirun.
        raise RankFailed(
            f"stopped by {signals.received.name}, and {command.argv[0]} ended with {how} before its "
            f"ranks reported that they had saved: see {logs}",
            128 + signals.received,
        )
    also = "" if output is not None else f", and in {logs}"
    raise RankFailed(
        f"{command.argv[0]} ended with {how}: the error of the rank that failed is above{also}", code_of_ranks(code)
    )
