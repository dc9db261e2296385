"""Requeueing a Slurm job, by a scontrol that records its arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from samestep.config.schema import PreemptionConfig
from samestep.run.requeue import requeue

JOB = {"SLURM_JOB_ID": "4711"}
ARRAY = {"SLURM_JOB_ID": "4719", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "8"}
AUTO = PreemptionConfig()

Scontrol = Callable[..., Path]


def reported(config: PreemptionConfig, signal: str, environ: dict[str, str]) -> list[str]:
    """The lines that a requeue reports."""
    lines: list[str] = []
    requeue(config, signal, environ, lines.append)
    return lines


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scontrol:
    """Puts a scontrol on the path; gives the file that its arguments go to."""

    def install(code: int = 0, said: str = "", mode: int = 0o755) -> Path:
        asked, script = tmp_path / "asked", tmp_path / "bin" / "scontrol"
        script.parent.mkdir()
        script.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n{said}\nexit {code}\n')
        script.chmod(mode)
        monkeypatch.setenv("PATH", str(script.parent))  # alone: this machine may have another
        return asked

    return install


@pytest.mark.parametrize(
    ("environ", "job"), [(JOB, "4711"), (ARRAY, "4711_8"), ({**ARRAY, "SLURM_ARRAY_TASK_ID": "0"}, "4711_0")]
)
def test_a_job_whose_end_was_announced_is_requeued(scontrol: Scontrol, environ: dict[str, str], job: str) -> None:
    asked = scontrol()
    assert reported(AUTO, "SIGUSR1", environ) == [f"Requeuing job {job}"]
    assert asked.read_text() == f"requeue {job}\n"


@pytest.mark.parametrize(
    ("config", "signal", "environ"),
    [
        (AUTO, "SIGTERM", JOB),
        (AUTO, "SIGINT", JOB),
        (AUTO, "SIGHUP", JOB),
        (PreemptionConfig(requeue=True), "SIGTERM", JOB),
        (PreemptionConfig(requeue=False), "SIGUSR1", JOB),
        (AUTO, "SIGUSR1", {}),
        (AUTO, "SIGUSR1", {"SLURM_ARRAY_TASK_ID": "8"}),
        (AUTO, "SIGUSR2", JOB),
    ],
)
def test_otherwise_nothing_is_requested_or_reported(
    scontrol: Scontrol, config: PreemptionConfig, signal: str, environ: dict[str, str]
) -> None:
    asked = scontrol()
    assert reported(config, signal, environ) == []
    assert not asked.exists() or "requeue" not in asked.read_text()


@pytest.mark.parametrize(
    ("state", "preempted", "requeued"),
    [("RUNNING", "2026-11-15T11:05:56", True), ("RUNNING", "None", False),
     ("CANCELLED", "2026-11-15T11:05:56", False), ("COMPLETING", "None", False)],
)  # fmt: skip
def test_a_job_that_ends_in_the_grace_of_its_preemption_is_requeued(
    scontrol: Scontrol, state: str, preempted: str, requeued: bool
) -> None:
    asked = scontrol(said=f"echo JobId=4711 JobState={state} PreemptTime={preempted}")
    assert reported(AUTO, "SIGTERM", JOB) == (["Requeuing job 4711"] if requeued else [])
    assert ("requeue 4711" in asked.read_text()) is requeued


def test_without_scontrol_the_user_learns_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    _, said = reported(AUTO, "SIGUSR1", JOB)
    assert said.startswith("Job 4711 is not requeued: scontrol cannot be started here")
    assert "Submit it again, and it resumes from the checkpoint" in said


def test_what_scontrol_refused_is_shown(scontrol: Scontrol) -> None:
    asked = scontrol(1, "echo 'Requested operation is presently disabled for job 4711' >&2")
    _, said = reported(AUTO, "SIGUSR1", JOB)
    assert asked.exists()
    assert said.startswith(
        "Job 4711 is not requeued: scontrol: Requested operation is presently disabled for "
        "job 4711. Submit with --requeue"
    )


def test_a_scontrol_that_fails_silently_is_reported_by_its_exit_code(scontrol: Scontrol) -> None:
    scontrol(3)
    assert "scontrol: exit code 3" in reported(AUTO, "SIGUSR1", JOB)[-1]


def test_a_scontrol_that_cannot_be_started_is_reported_too(scontrol: Scontrol) -> None:
    scontrol(mode=0o644)
    assert reported(AUTO, "SIGUSR1", JOB)[-1].startswith("Job 4711 is not requeued")


def test_a_requeue_is_reported_before_slurm_can_end_the_job(scontrol: Scontrol) -> None:
    requested = scontrol()
    seen_before: list[bool] = []
    requeue(AUTO, "SIGUSR1", JOB, lambda line: seen_before.append(requested.exists()))
    assert seen_before == [False]
    assert requested.exists()


@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_a_scontrol_that_is_ended_with_the_job_is_no_failure(scontrol: Scontrol, signal: str) -> None:
    """Slurm sends SIGTERM to all processes of a job that it requeues, and SIGKILL later."""
    scontrol(said=f"kill -{signal} $$")
    assert reported(AUTO, "SIGUSR1", JOB) == ["Requeuing job 4711"]


def test_a_scontrol_answers_though_the_job_is_ended_meanwhile(scontrol: Scontrol) -> None:
    scontrol(1, "kill -TERM $$; echo 'Job has already finished' >&2")
    assert "scontrol: Job has already finished" in reported(AUTO, "SIGUSR1", JOB)[-1]
