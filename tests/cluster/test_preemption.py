"""A Slurm job that is stopped in any way is restarted, resumes, and ends as if untouched."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from samestep.train.record import RunRecord
from tests.cluster.runs import Training, is_same, wait_for
from tests.cluster.slurm import Slurm
from tests.cluster.test_launching import run_on_ctl
from tests.variations import variations


def submitted(slurm: Slurm, training: Training, *options: str) -> str:
    argv = training.launch("run", "--via", "slurm", "--nodes", "2", "--nproc", "1", *options)
    done = run_on_ctl(slurm.hosts, training, argv, slurm.env)
    assert done.returncode == 0, done.stderr
    [job] = re.findall(r"submitted job (\d+)", done.stderr)
    return str(job)


def output_of(training: Training, job: str) -> str:
    return (training.folder / "run" / "slurm" / f"{job}.out").read_text()


def log_of_rank_0(training: Training) -> str:
    """What rank 0 logged, before and after the requeue.

    Not Slurm's output: srun and mpirun pass on what ranks print, and are ended with the job by
    its requeue, so the last lines may be lost there.
    """
    return (training.folder / "run" / "logs" / "rank-0.log").read_text()


def requeue(slurm: Slurm, job: str, folder: Path) -> None:
    slurm.run(["scontrol", "requeue", job])


def preempt(slurm: Slurm, job: str, folder: Path) -> None:
    """A job of a partition with precedence wants all CPUs of both nodes for a moment."""
    script = folder / "urgent.sh"
    script.write_text("#!/bin/bash\nsleep 1\n")
    urgent = slurm.submit(script, "--partition=high", "-N2", "-n8", "--nodelist=n[1-2]")
    assert slurm.wait(urgent) == "COMPLETED"


def lose_a_node(slurm: Slurm, job: str, folder: Path) -> None:
    """Without its power a node saves nothing: the job resumes from its last checkpoint."""
    slurm.hosts.power_off("n2")
    slurm.run(["scontrol", "update", "nodename=n2", "state=down", "reason=lost"])


def preempt_with_grace(slurm: Slurm, job: str, folder: Path) -> None:
    preempt(slurm, job, folder)


@pytest.mark.requirement("000-P4-4")
@pytest.mark.parametrize("stop", variations([requeue, preempt, preempt_with_grace, lose_a_node], kept=[requeue]))
def test_a_restarted_job_ends_with_the_untouched_runs_bits(
    slurm: Slurm, tmp_path: Path, untouched: RunRecord, stop: Callable[[Slurm, str, Path], None]
) -> None:
    training = Training.slow(tmp_path, loader={"workers": 1}, checkpoint={"every_steps": 1, "asynchronous": False})
    # Without its own --signal, a job in a partition with a grace time gets SIGTERM and time.
    grace = ["--partition", "grace", "launch.slurm.warn_seconds=null"]
    job = submitted(slurm, training, *(grace if stop is preempt_with_grace else []))
    wait_for(lambda: training.steps_of("run") >= 2)
    stop(slurm, job, tmp_path)
    wait_for(lambda: slurm.show(job)["Restarts"] == "1")
    training.hurry()
    assert slurm.wait(job) == "COMPLETED", output_of(training, job)
    log = log_of_rank_0(training)
    assert slurm.show(job)["Restarts"] == "1"
    assert re.search(r"Resuming from .*now 2 \(Slurm restart 1\)", log)
    if stop is not lose_a_node:
        # This cluster announces a preemption by the job's own signal, where there is one.
        assert re.search(r"SIG(TERM|USR1) on rank 0 stopped the run after step", log), log
    assert training.record("run").start > 0
    assert is_same(training.record("run"), untouched)


# What `--signal=USR1@120` and `--signal=B:USR1@120` do near the end of the job's time, now.
WARNINGS = {"srun": ["--signal=USR1"], "torchrun": ["--signal=USR1"], "mpirun": ["--batch", "--signal=USR1"]}


@pytest.mark.parametrize("style", variations(WARNINGS, kept=["srun"]))
@pytest.mark.needs("mpirun")
def test_a_job_that_is_warned_of_its_end_saves_and_requeues_itself(
    slurm: Slurm, tmp_path: Path, untouched: RunRecord, style: str
) -> None:
    training = Training.slow(tmp_path, checkpoint={"every_minutes": None, "every_epochs": None})
    job = submitted(slurm, training, f"launch.slurm.style={style}")
    wait_for(lambda: training.steps_of("run") >= 2)
    slurm.run(["scancel", *WARNINGS[style], job])
    wait_for(lambda: slurm.show(job)["Restarts"] == "1")
    training.hurry()
    assert slurm.wait(job) == "COMPLETED", output_of(training, job)
    log = log_of_rank_0(training)
    assert re.search(r"SIGUSR1 on rank \d stopped the run after step", log), log
    assert f"Requeuing job {job}\n" in log
    assert "not requeued" not in log
    assert training.record("run").start > 0
    assert is_same(training.record("run"), untouched)
