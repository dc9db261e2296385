"""Variables of this process, of those it starts, and of a launch that is started again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from samestep.environment.variables import exporting, has_agent, is_same_launch, launch_names, launch_variables


def test_exporting_ends_with_its_block_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_TEST", "before")
    script = "import os; print(os.environ['SAMESTEP_TEST'], os.environ['SAMESTEP_NEW'])"

    def start() -> str:
        with exporting({"SAMESTEP_TEST": "inside", "SAMESTEP_NEW": "too"}):
            done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, check=True)
            raise KeyError(done.stdout)

    with pytest.raises(KeyError, match="inside too"):
        start()
    assert os.environ["SAMESTEP_TEST"] == "before"
    assert "SAMESTEP_NEW" not in os.environ


def test_an_agent_is_known_by_its_error_file() -> None:
    assert has_agent({"TORCHELASTIC_ERROR_FILE": ""})
    assert not has_agent({})


def test_a_launch_is_the_same_when_it_is_started_again() -> None:
    environ = launch_variables("torchrun-n1-77")
    assert launch_names(environ) == ["torchrun-n1-77"]
    assert is_same_launch(environ, ["torchrun-n1-77"])
    assert not is_same_launch(environ, ["torchrun-n1-78"])
    assert not is_same_launch({}, [])


MPIRUN_IN_JOB = {"SAMESTEP_LAUNCH_ID": "mpirun-n1-77", "SLURM_JOB_ID": "5"}


@pytest.mark.parametrize(
    ("now", "same"),
    [
        # Of a requeued job, mpirun has another process number and so another name.
        ({"SAMESTEP_LAUNCH_ID": "mpirun-n1-90", "SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SAMESTEP_LAUNCH_ID": "mpirun-n1-90", "SLURM_JOB_ID": "6", "SLURM_RESTART_COUNT": "1"}, False),
        # A second mpirun in the same job is a launch of its own.
        ({"SAMESTEP_LAUNCH_ID": "mpirun-n1-90", "SLURM_JOB_ID": "5"}, False),
        ({"SAMESTEP_LAUNCH_ID": "mpirun-n1-90", "SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": ""}, False),
        ({"SAMESTEP_LAUNCH_ID": "mpirun-n1-77"}, True),
        ({"SLURM_JOB_ID": "5"}, True),
        ({}, False),
    ],
)
def test_an_mpirun_resumes_when_its_slurm_job_is_requeued(now: dict[str, str], same: bool) -> None:
    assert is_same_launch(now, launch_names(MPIRUN_IN_JOB)) is same


def test_tasks_of_an_array_are_launches_of_their_own() -> None:
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_RESTART_COUNT": "1"}
    first = {**array, "SLURM_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "0"}
    again = {**first, "SLURM_JOB_ID": "8"}
    other = {**array, "SLURM_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1"}
    assert is_same_launch(again, launch_names(first))
    assert not is_same_launch(other, launch_names(first))
