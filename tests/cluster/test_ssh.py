"""Machines without a scheduler: agents over a real sshd."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from samestep.train.record import RunRecord
from tests.cluster.runs import PATIENCE, TASKS, Training, is_same, wait_for
from tests.cluster.sshd import Sshd


def over_ssh(training: Training, sshd: Sshd, run: str = "run") -> list[str]:
    # Over ssh no variable travels but those that the config names.
    variables = [f"launch.environment.{k}={v}" for k, v in training.environment.items()]
    return training.launch(run, "--via", "ssh", "--hosts", "n1:1,n2:1", f"launch.ssh=ssh -F {sshd.config}", *variables)


def test_a_run_on_two_machines(sshd: Sshd, tmp_path: Path, untouched: RunRecord) -> None:
    training = Training.write(tmp_path)
    done = sshd.hosts.run("ctl", over_ssh(training, sshd), cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "[n1] [Rank 0] Distributed training initialized" in done.stderr
    assert "2 processes on 2 machines" in done.stderr
    assert is_same(training.record("run"), untouched)


def test_a_machine_that_lets_nobody_in_is_named_before_anything_starts(sshd: Sshd, tmp_path: Path) -> None:
    training = Training.write(tmp_path)
    with sshd.lock_out("n2"):
        done = sshd.hosts.run("ctl", over_ssh(training, sshd), cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode == 2
    assert "n2 does not let you in without a password" in done.stderr
    assert "ssh-copy-id n2" in done.stderr
    assert "n1" not in done.stderr.replace("n2", "")
    assert not (tmp_path / "run").exists()


def test_when_one_machine_fails_all_end_and_its_traceback_is_here(sshd: Sshd, tmp_path: Path) -> None:
    training = Training.write(tmp_path, task=f"{TASKS}:Broken")
    done = sshd.hosts.run("ctl", over_ssh(training, sshd), cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode == 1
    assert "[n2] samestep: rank 1 on n2" in done.stderr
    assert "ZeroDivisionError: my own bug" in done.stderr
    assert _processes(sshd, tmp_path) == []


def test_ctrl_c_saves_on_all_machines_and_the_run_resumes_later(
    sshd: Sshd, tmp_path: Path, untouched: RunRecord
) -> None:
    training = Training.slow(tmp_path)
    process = sshd.hosts.start(
        "ctl", over_ssh(training, sshd), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_for(lambda: training.steps_of("run") >= 2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, output
    training.hurry()
    assert "SIGTERM on rank 0 stopped the run after step" in output
    assert _processes(sshd, tmp_path) == []
    done = sshd.hosts.run("ctl", over_ssh(training, sshd), cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert is_same(training.record("run"), untouched)


@pytest.mark.variation("test_an_mpirun_whose_launcher_is_killed_ends_with_all_its_ranks, over ssh")
def test_a_launcher_that_is_killed_leaves_nothing_behind(sshd: Sshd, tmp_path: Path) -> None:
    training = Training.slow(tmp_path)
    process = sshd.hosts.start(
        "ctl", over_ssh(training, sshd), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(lambda: training.steps_of("run") >= 2)
    process.kill()
    process.wait()
    wait_for(lambda: _processes(sshd, tmp_path) == [])


def _processes(sshd: Sshd, folder: Path) -> list[str]:
    """Command lines on both machines that name something in the folder."""
    found = []
    for host in ("n1", "n2"):
        listed = sshd.hosts.run(host, ["ps", "-eo", "args"]).stdout.splitlines()
        found += [line for line in listed if f"{folder}/" in line and "samestep" in line]
    return found
