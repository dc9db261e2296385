"""Asking Slurm to start this job again, after a signal that announced its end."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from samestep.config.schema import PreemptionConfig

_ANNOUNCING = "SIGUSR1"
"""What `sbatch --signal` sends before the time limit. After SIGTERM Slurm requeues a preempted
job by itself, and a cancelled one must stay cancelled; so must one whose launcher was stopped,
which hands that on as SIGUSR2."""


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
    if not config.requeue or signal != _ANNOUNCING or job is None:
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
