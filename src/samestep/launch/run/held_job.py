"""A Slurm job that belongs to the command that submits it: found again, and cancelled with it. No torch here.

For commands that submit many, such as a sweep: nobody looks after each job, and none may run twice.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from samestep.checkpoint.run_result import RunResult, read_result
from samestep.distributed.signals import SignalForwarder
from samestep.errors import CheckpointError, LaunchError, RankFailed, Stopped
from samestep.launch.commands.slurm import SlurmJob
from samestep.launch.run.slurm import Submitted, cancel, follow_job, job_of_script, jobs_of, logs_of, state_of, submit
from samestep.parsing.files import read_lines
from samestep.parsing.limits import short

Report = Callable[[str], None]

_TEMPORARY = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "did not answer within",
    "Zero Bytes were transmitted",
    "temporarily unable to accept job",
    "Resource temporarily unavailable",
    "SubmitJobLimit",
)
"""What sbatch says when it would take the same job later."""
_PAUSE = 15.0
_LOOK = 0.25
_SECONDS_OF_HURRY = 30.0


def run_held(job: SlurmJob, report: Report) -> None:
    """Submit a job, or find the one that an earlier command has left, and stay with it to its end.

    A stop signal cancels it: its ranks save first. A Slurm that does not answer is waited for: the
    job runs on meanwhile.

    Raises:
        Stopped: if it was cancelled by this command's signal, or has saved and ended by itself.
        RankFailed: if it failed, with the reason that its output gives.
    """
    with SignalForwarder(lambda number: None, lambda: None) as signals:
        found = _found_or_submitted(job, report, lambda: signals.received is not None)
        run = job.folder.parent
        watch = _Watch(run, found, lambda: signals.received is not None)
        try:
            follow_job(run, found, report, sys.stdout, watch.hurries, patience=float("inf"))
        except RankFailed as error:
            if signals.received is None and not watch.is_done():
                reason = last_words(logs_of(run, found))
                raise RankFailed(f"{reason} ({error})" if reason else str(error), error.exit_code) from None
        if signals.received is not None:
            raise Stopped(f"{signals.received.name} cancelled job {found.job}")


def _found_or_submitted(job: SlurmJob, report: Report, is_stopped: Callable[[], bool]) -> Submitted:
    while True:
        try:
            left = left_job(job)
            if left is not None:
                report(f"job {left.job} of an earlier command is there already, and followed")
                return left
            found = submit(job)
        except LaunchError as error:
            if not any(text in str(error) for text in _TEMPORARY):
                raise
            report(f"{error}; tried again in {_PAUSE:g} s")
            _wait(_PAUSE, is_stopped)
        else:
            report(f"submitted job {found.job}; its output: {job.folder}")
            return found


def _wait(seconds: float, is_stopped: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if is_stopped():
            raise Stopped("stopped before the job was submitted")
        time.sleep(_LOOK)


def left_job(job: SlurmJob) -> Submitted | None:
    """Return the job of this run that has not ended, if there is one: by the run's record, or by Slurm's own.

    A command that was killed while it submitted has recorded nothing, but Slurm knows the script.
    """
    for earlier in reversed(jobs_of(job.folder.parent)):
        if not state_of(earlier.job).is_final:
            return earlier
    return job_of_script(job)


class _Watch:
    """Events of a held job besides its states."""

    def __init__(self, run: Path, job: Submitted, is_stopped: Callable[[], bool]) -> None:
        self._run, self._job, self._is_stopped = run, job, is_stopped
        self._before = self._result()
        self._ends: float | None = None
        """When it became known that the job is about to end."""
        self._is_cancelled = False

    def hurries(self) -> bool:
        """Return whether the job is about to end: it was cancelled just now, or its run is over."""
        if self._is_stopped() and not self._is_cancelled:
            try:
                cancel(self._job)
            except LaunchError:
                return False  # Slurm does not answer: the next look tries again
            self._is_cancelled, self._ends = True, time.monotonic()
        if self._ends is None and self._is_over():
            self._ends = time.monotonic()
        return self._ends is not None and time.monotonic() - self._ends < _SECONDS_OF_HURRY

    def is_done(self) -> bool:
        """Return whether its run has come to its end: then nothing that happened to the job later matters."""
        result = self._result()
        return result is not None and result.is_done

    def _is_over(self) -> bool:
        result = self._result()
        return result != self._before and result is not None and result.status != "running"

    def _result(self) -> RunResult | None:
        try:
            return read_result(self._run)
        except CheckpointError:
            return None  # whoever reads it for its values says so


def last_words(outputs: list[Path]) -> str:
    """Return the last reason that a job's ranks gave for their failure."""
    lines = [line.rstrip() for path in outputs for line in read_lines(path)]
    starts = [number for number, line in enumerate(lines) if line.startswith("samestep: ")]
    if not starts:
        return ""
    last = lines[starts[-1]].removeprefix("samestep: ")
    if last.endswith("failed:"):  # a traceback follows, whose last line is the error
        rest = (line for line in lines[starts[-1] + 1 :] if line and line[0] != " ")
        last += " " + next((line for line in rest if not line.startswith("Traceback")), "")
    return short(last, 500)
