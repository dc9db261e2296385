"""Requeueing a Slurm job, by a scontrol that writes down what it was asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from samestep.config.schema import PreemptionConfig
from samestep.train.requeue import job_name, requeue

JOB = {"SLURM_JOB_ID": "4711"}
ARRAY = {"SLURM_JOB_ID": "4719", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "8"}
AUTO = PreemptionConfig()

Scontrol = Callable[..., Path]


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


@pytest.mark.parametrize(("environ", "job"), [(JOB, "4711"), (ARRAY, "4711_8")])
def test_a_job_whose_end_was_announced_is_requeued(
    scontrol: Scontrol, environ: dict[str, str], job: str
) -> None:
    asked = scontrol()
    assert requeue(AUTO, "SIGUSR1", environ) == f"Job {job} is requeued"
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
def test_otherwise_nothing_is_asked_and_nothing_said(
    scontrol: Scontrol, config: PreemptionConfig, signal: str, environ: dict[str, str]
) -> None:
    asked = scontrol()
    assert requeue(config, signal, environ) == ""
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
    said = requeue(AUTO, "SIGTERM", JOB)
    assert said == ("Job 4711 is requeued" if requeued else "")
    assert ("requeue 4711" in asked.read_text()) is requeued


def test_a_task_of_an_array_is_requeued_alone() -> None:
    assert job_name(ARRAY) == "4711_8"
    assert job_name({**ARRAY, "SLURM_ARRAY_TASK_ID": "0"}) == "4711_0"
    assert job_name(JOB) == "4711"
    assert job_name({}) is None


def test_without_scontrol_the_person_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = requeue(AUTO, "SIGUSR1", JOB)
    assert said.startswith("Job 4711 is not requeued: scontrol cannot be started here")
    assert "Submit it again, and it goes on from the checkpoint" in said


def test_what_scontrol_refused_is_shown(scontrol: Scontrol) -> None:
    asked = scontrol(1, "echo 'Requested operation is presently disabled for job 4711' >&2")
    said = requeue(AUTO, "SIGUSR1", JOB)
    assert asked.exists()
    assert said.startswith(
        "Job 4711 is not requeued: scontrol said: Requested operation is presently disabled for "
        "job 4711. Submit with --requeue"
    )


def test_a_scontrol_that_fails_without_a_word_is_told_by_its_exit_code(scontrol: Scontrol) -> None:
    scontrol(3)
    assert "scontrol said: exit code 3" in requeue(AUTO, "SIGUSR1", JOB)


def test_a_scontrol_that_cannot_be_started_is_told_too(scontrol: Scontrol) -> None:
    scontrol(mode=0o644)
    assert requeue(AUTO, "SIGUSR1", JOB).startswith("Job 4711 is not requeued")
