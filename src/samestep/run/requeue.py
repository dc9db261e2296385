"""Ask Slurm to start this job again, after a signal that announced its end."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from signal import SIG_BLOCK, SIG_SETMASK, SIGTERM, pthread_sigmask

from samestep.config.schema import PreemptionConfig

_SECONDS = 60.0
"""How long scontrol gets to answer."""
_ANNOUNCING = "SIGUSR1"
"""What `sbatch --signal` sends before the time limit."""
_ENDING = "SIGTERM"
"""What Slurm sends to a job that is preempted, requeued or cancelled. It requeues the first two
itself, unless a preempted one ends by itself in the grace time that it was given; a cancelled
one must stay cancelled, and so must one whose launcher was stopped."""


def job_name(environ: Mapping[str, str]) -> str | None:
    """Return the job as scontrol takes it; None outside of one.

    In an array the last task's SLURM_JOB_ID is the array's own: requeueing that would start
    every task again.
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if array is not None and task is not None:
        return f"{array}_{task}"
    return environ.get("SLURM_JOB_ID")


def requeue(config: PreemptionConfig, signal: str, environ: Mapping[str, str], report: Callable[[str], None]) -> None:
    """Requeue the job if that is due, and report it.

    Slurm ends a job as soon as it requeues it: this process may be gone before scontrol returns,
    so it reports first, and afterwards only what went wrong.
    """
    job = job_name(environ)
    if not config.requeue or job is None:
        return
    if signal != _ANNOUNCING and not (signal == _ENDING and _has_grace(job)):
        return
    report(f"Requeuing job {job}")
    try:
        with _sigterm_blocked():
            done = _scontrol("requeue", job)
    except OSError as error:
        report(
            f"Job {job} is not requeued: scontrol cannot be started here ({error.strerror}). Submit "
            "it again, and it resumes from the checkpoint"
        )
    except subprocess.TimeoutExpired:
        report(f"Job {job} may not be requeued: scontrol did not answer within {_SECONDS:g} s")
    else:
        # Ended by a signal, it was ended with the job, which is what a requeue does.
        if done.returncode > 0:
            reason = done.stderr.strip() or f"exit code {done.returncode}"
            report(
                f"Job {job} is not requeued: scontrol: {reason}. Submit with --requeue, or submit it "
                "again, and it resumes from the checkpoint"
            )


@contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """Let the processes started meanwhile outlive the SIGTERM that Slurm sends to the whole job.

    Otherwise a scontrol whose request was granted is ended before it has seen the answer, and the
    requeue looks like a failure. The blocked signal stays pending for this process.
    """
    before = pthread_sigmask(SIG_BLOCK, {SIGTERM})
    try:
        yield
    finally:
        pthread_sigmask(SIG_SETMASK, before)


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["scontrol", *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False)


def _has_grace(job: str) -> bool:
    """Return whether Slurm preempts this job, but lets it run a little longer."""
    try:
        shown = _scontrol("show", "job", "--oneliner", job).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    state = re.search(r"JobState=(\w+)", shown)
    preempted = re.search(r"PreemptTime=\d", shown)
    return preempted is not None and state is not None and state[1] == "RUNNING"
