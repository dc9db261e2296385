"""samestep result, and train --json: what a run has come to, for scripts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cli.processes import TASKS, samestep, started, wait_for


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "slow.yaml"
    path.write_text(
        f"task: {TASKS}:Slow\nglobal_batch: 32\nlanes: 8\nsteps: 4\nparams: {{seconds: 0.0}}\n"
        "log_every: 1\ndistributed: {threads_per_rank: 1}\n"
    )
    return path


def test_a_training_prints_its_result_and_it_is_read_again_without_a_rank(
    config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "slow"
    half = samestep("train", config, "--stop-after", "2", "--json", cwd=tmp_path)
    assert half.returncode == 75, half.stderr
    assert json.loads(half.stdout)["status"] == "preempted"
    assert samestep("result", run, cwd=tmp_path).returncode == 75
    done = samestep("train", config, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["status"], found["steps"], found["run"]) == ("finished", 4, "runs/slow")
    read = samestep("result", run, "--json", cwd=tmp_path)
    assert read.returncode == 0, read.stderr
    assert json.loads(read.stdout) == {**found, "run": str(run)}
    assert "finished" in samestep("result", run, cwd=tmp_path).stdout


def test_a_killed_run_is_known_to_be_gone(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "slow"
    with started("train", config, "steps=60", "params.seconds=600", cwd=tmp_path) as process:
        wait_for(lambda: (run / "result.json").exists())
        running = samestep("result", run, "--json", cwd=tmp_path)
        assert (running.returncode, json.loads(running.stdout)["status"]) == (75, "running")
        holder = int((run / "run.lock").read_text().split()[1])
        os.kill(holder, signal.SIGKILL)
        process.wait()
    killed = samestep("result", run, "--json", cwd=tmp_path)
    assert (killed.returncode, json.loads(killed.stdout)["status"]) == (75, "killed")


def test_a_failed_run_and_none_at_all(config: Path, tmp_path: Path) -> None:
    failed = samestep("train", config, "optimizer.lr=1e30", "--json", cwd=tmp_path)
    assert failed.returncode != 0
    read = samestep("result", tmp_path / "runs" / "slow", "--json", cwd=tmp_path)
    assert read.returncode == 1, read.stdout
    assert json.loads(read.stdout)["status"] == "failed"
    none = samestep("result", tmp_path, cwd=tmp_path)
    assert none.returncode == 2
    assert "holds no result.json" in none.stderr
