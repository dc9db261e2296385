"""Asking Slurm to start this job again, after a signal that announced its end."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from samestep.config.schema import PreemptionConfig

_ANNOUNCING = "SIGUSR1"
"""What `sbatch --signal` sends before the time limit."""
_ENDING = "SIGTERM"
"""What Slurm sends to a job that is preempted, requeued or cancelled. It requeues the first two
itself, unless a preempted one ends by itself in the grace time that it was given; a cancelled
one must stay cancelled, and so must one whose launcher was stopped."""


def job_name(environ: Mapping[str, str]) -> str | None:
    """The job as scontrol takes it; None outside of one.

    In an array the last task's SLURM_JOB_ID is the array's own: requeueing that would start
    every task again.
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if array is not None and task is not None:
        return f"{array}_{task}"
    return environ.get("SLURM_JOB_ID")


def requeue(config: PreemptionConfig, signal: str, environ: Mapping[str, str]) -> str:
    """Requeue the job if that is due; says what was done, or an empty text for nothing."""
    job = job_name(environ)
    if not config.requeue or job is None:
        return ""
    if signal != _ANNOUNCING and not (signal == _ENDING and _has_grace(job)):
        return ""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        return (
            f"Job {job} is not requeued: scontrol cannot be started here ({error.strerror}). Submit "
            "it again, and it goes on from the checkpoint"
        )
    except subprocess.TimeoutExpired:
        return f"Job {job} may not be requeued: scontrol did not answer within 60 s"
    if done.returncode != 0:
        reason = done.stderr.strip() or f"exit code {done.returncode}"
        return (
            f"Job {job} is not requeued: scontrol said: {reason}. Submit with --requeue, or submit "
            "it again, and it goes on from the checkpoint"
        )
    return f"Job {job} is requeued"


def _has_grace(job: str) -> bool:
    """Whether Slurm preempts this job, but lets it run a little longer."""
    command = ["scontrol", "show", "job", "--oneliner", job]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    state = re.search(r"JobState=(\w+)", said.stdout)
    preempted = re.search(r"PreemptTime=\d", said.stdout)
    return preempted is not None and state is not None and state[1] == "RUNNING"
