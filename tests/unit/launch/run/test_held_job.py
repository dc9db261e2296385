"""A job that belongs to its command: found again, cancelled with it, waited for, and explained."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from samestep.checkpoint.run_result import RunResult, write_result
from samestep.errors import LaunchError, RankFailed, Stopped
from samestep.launch.run import held_job
from samestep.launch.run.held_job import run_held
from samestep.launch.run.slurm import jobs_of
from tests.unit.launch.test_run import (
    RUNNING,
    Cluster,
    cluster,  # noqa: F401 - a fixture
    program,
    shown,
    slept,  # noqa: F401
)

pytestmark = pytest.mark.usefixtures("slept")


@pytest.fixture(autouse=True)
def queue(cluster: Cluster) -> Path:  # noqa: F811
    """What squeue prints: jobs and their scripts."""
    path = cluster.root / "queue"
    path.touch()
    program(cluster.root / "bin" / "squeue", f"cat '{path}'")
    return path


def held(cluster: Cluster, *answers: str) -> list[str]:  # noqa: F811
    reported: list[str] = []
    cluster.answers(*answers)
    run_held(cluster.job(), reported.append)
    return reported


def test_a_job_is_submitted_once_and_found_again(cluster: Cluster, queue: Path) -> None:  # noqa: F811
    assert held(cluster, RUNNING, shown("COMPLETED"))[0].startswith("submitted job 12")
    again = held(cluster, RUNNING, RUNNING, shown("COMPLETED"))
    assert again[0] == "job 12 of an earlier command is there already, and followed"
    assert len(cluster.calls_of("sbatch")) == 1
    # One that was killed before it could record its job: Slurm knows the script.
    (cluster.run / "slurm" / "jobs.jsonl").unlink()
    queue.write_text(f"11 /other/job.sh\n12 {cluster.run / 'slurm' / 'job.sh'}\n")
    assert "is there already" in held(cluster, RUNNING, shown("COMPLETED"))[0]
    assert [job.job for job in jobs_of(cluster.run)] == ["12"]
    assert len(cluster.calls_of("sbatch")) == 1


def test_a_stop_signal_cancels_it(cluster: Cluster) -> None:  # noqa: F811
    def report(line: str) -> None:
        if "RUNNING" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    cluster.answers(RUNNING, RUNNING, shown("CANCELLED", ExitCode="0:15"))
    with pytest.raises(Stopped, match="SIGTERM cancelled job 12"):
        run_held(cluster.job(), report)
    assert cluster.calls_of("scancel") == ["12"]


def test_a_failure_is_explained_by_the_ranks(cluster: Cluster) -> None:  # noqa: F811
    failed = shown("FAILED", ExitCode="1:0")
    with pytest.raises(RankFailed, match=r"^job 12 ended as FAILED"):
        held(cluster, failed)
    cluster.forgets()
    cluster.writes("samestep: rank 1 on n2 failed:\nTraceback:\n  File x\nValueError: mine\n\nsrun: error\n")
    with pytest.raises(RankFailed, match=r"rank 1 on n2 failed: ValueError: mine \(job 12"):
        held(cluster, failed)


def test_a_run_that_is_done_is_done_whatever_became_of_its_job(cluster: Cluster) -> None:  # noqa: F811
    def report(line: str) -> None:
        if "RUNNING" in line:
            write_result(cluster.run, RunResult("finished"))

    cluster.answers(RUNNING, RUNNING, shown("NODE_FAIL"))
    run_held(cluster.job(), report)


def test_a_slurm_that_is_away_is_waited_for_and_one_that_refuses_is_not(
    cluster: Cluster,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_job, "_PAUSE", 0.01)
    note, busy = f"{cluster.root}/tried", "Unable to contact slurm controller (connect failure)"
    program(
        cluster.root / "bin" / "sbatch",
        f"[ -e '{note}' ] && echo 12 && exit; touch '{note}'; echo '{busy}' >&2; exit 1",
    )
    reported = held(cluster, RUNNING, shown("COMPLETED"))
    assert "Unable to contact slurm controller" in reported[0]
    assert reported[1].startswith("submitted job 12")
    cluster.forgets()
    program(cluster.root / "bin" / "sbatch", "echo 'invalid partition specified' >&2; exit 1")
    with pytest.raises(LaunchError, match="invalid partition specified"):
        run_held(cluster.job(), reported.append)
