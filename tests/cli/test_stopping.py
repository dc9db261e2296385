"""Signals, lost ranks and lost launchers, with the commands that people type."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cli.processes import children_of, processes_of, samestep, started, wait_for, write_config
from tests.ranks import free_port

SAVED = 75
PATIENCE = 180.0
"""Seconds that a test waits for something to happen, on a machine that is busy with others."""

SECRET = "of tests, and no secret at all"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a run that takes half a minute, unless the file `hurry` is written."""
    # The timeout is longer than any wait of these tests: what they wait for must not be it.
    params = {"seconds": 0.06, "hurry": str(tmp_path / "hurry")}
    return write_config(
        tmp_path / "slow.yaml", "Slow", steps=60, params=params, checkpoint={"every_steps": 3}, log_every=1
    )


def steps_done(run: Path) -> int:
    return len(losses(run))


def losses(run: Path) -> list[float]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("untouched")
    path = write_config(folder / "fast.yaml", "Slow", steps=60, params={"seconds": 0.0}, log_every=1)
    done = samestep("train", path, cwd=folder)
    assert done.returncode == 0, done.stderr
    return losses(folder / "runs" / "fast")


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_process_saves_and_stops_it(number: signal.Signals, config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "slow"
    with started("train", config, "checkpoint.every_steps=50", cwd=tmp_path) as process:
        wait_for(lambda: steps_done(run) >= 2)
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == SAVED, output
    assert f"{number.name} stopped the run after step" in output
    assert "Traceback" not in output
    assert f"after step {int(checkpoints(run)[-1].removeprefix('step-'))}:" in output


def test_a_signal_to_the_launcher_saves_on_all_ranks_and_the_run_resumes(
    config: Path, tmp_path: Path, untouched: list[float]
) -> None:
    run = tmp_path / "runs" / "slow"
    # The launcher signals whole groups of processes, and with a rank its loader's.
    with started("launch", config, "loader.workers=1", "--nproc", "2", cwd=tmp_path) as process:
        wait_for(lambda: steps_done(run) >= 4)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == SAVED, output
    assert "SIGTERM on rank 0 stopped the run after step" in output
    assert not processes_of(config)
    ended = samestep("launch", config, "--nproc", "3", "params.seconds=0.0", "resume.allow=[params]", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "written" in ended.stderr
    assert "at world size 2; now 3" in ended.stderr
    assert losses(run) == untouched


def test_a_second_interrupt_stops_at_once(config: Path, tmp_path: Path) -> None:
    with started("launch", config, "params.seconds=600", "--nproc", "2", cwd=tmp_path) as process:
        # Both: before its first step a rank ends at once.
        wait_for(lambda: all((tmp_path / f"hurry.waiting-{rank}").exists() for rank in range(2)))
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        said = [""]
        while "press Ctrl-C again to stop at once" not in said[-1]:
            said.append(process.stdout.readline())
            assert process.poll() is None, f"the step takes ten minutes; it said {said}"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGINT, output
    assert not processes_of(config)


def ranks_of(config: Path, launcher: int) -> list[int]:
    return [pid for pid in processes_of(config) if pid != launcher]


@pytest.mark.requirement("004-SM-4")
def test_a_killed_rank_is_named_and_the_others_end(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "slow"
    with started("launch", config, "--nproc", "3", cwd=tmp_path) as process:
        wait_for(lambda: steps_done(run) >= 2)
        victim = ranks_of(config, process.pid)[0]
        os.kill(victim, signal.SIGKILL)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    first = next(line for line in output.splitlines() if line.startswith("samestep: rank"))
    assert f"(pid {victim}) failed" in first
    assert "ended by SIGKILL" in output
    assert len([line for line in output.splitlines() if line.startswith("rank ")]) == 2
    assert not processes_of(config)


def test_a_killed_launcher_leaves_no_rank_behind(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "slow"
    cold = "ranks that ask the kernel to end with a parent that has started them by exec"
    with started("launch", config, "--nproc", "2", cwd=tmp_path, cold=cold) as process:
        wait_for(lambda: steps_done(run) >= 2)
        assert len(ranks_of(config, process.pid)) == 2
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_for(lambda: not processes_of(config))
    assert len(checkpoints(run)) >= 1, "they saved before they ended"


def test_a_lost_rank_shrinks_the_world_and_the_run_resumes(
    config: Path, tmp_path: Path, untouched: list[float]
) -> None:
    run = tmp_path / "runs" / "slow"
    arguments = (
        "--nproc", "1:3", "--max-restarts", "2",
        # A restart resumes even where the launch must not: it is the same launch.
        "resume=never",
        # Nothing is saved but what the ranks that are left save.
        "checkpoint.every_steps=1000", "checkpoint.every_epochs=null", "evaluation.every_epochs=null",
    )  # fmt: skip
    with started("launch", config, *arguments, cwd=tmp_path) as process:
        wait_for(lambda: steps_done(run) >= 4)
        os.kill(ranks_of(config, process.pid)[0], signal.SIGKILL)
        (tmp_path / "hurry").touch()
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    assert "Restarting on 2 ranks from the last checkpoint; 2 restart(s) left" in output
    assert "at world size 3; now 2" in output
    assert losses(run) == untouched


def test_two_runs_in_one_directory_are_refused(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "slow"
    with started("train", config, cwd=tmp_path) as process:
        wait_for(lambda: steps_done(run) >= 1)
        second = samestep("train", config, cwd=tmp_path)
        assert second.returncode == 2
        assert f"is in use by process {process.pid} on" in second.stderr
        assert "Traceback" not in second.stderr
        assert process.poll() is None


def is_served(port: int) -> bool:
    """Whether somebody listens at a port of this machine; a connection would disturb them."""
    listening = "0A"
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return any(row[1].endswith(f":{port:04X}") and row[3] == listening for row in rows)


def test_a_node_is_lost_and_comes_back(config: Path, tmp_path: Path, untouched: list[float]) -> None:
    """Two agents on this machine are two nodes; the second is powered off, then started again."""
    port = free_port()
    run = tmp_path / "runs" / "slow"
    arguments = (
        "launch", config, "params.seconds=0.2", "--nproc", "1", "--nodes", "1:2",
        "--rendezvous", f"127.0.0.1:{port}", "--max-restarts", "4",
    )  # fmt: skip

    def log() -> str:
        path = run / "logs" / "rank-0.log"
        return path.read_text() if path.exists() else ""

    with started(*arguments, cwd=tmp_path, SAMESTEP_SECRET=SECRET) as first:
        wait_for(lambda: is_served(port))
        with started(*arguments, cwd=tmp_path, SAMESTEP_SECRET=SECRET) as second:
            wait_for(lambda: "2 ranks drive" in log() and steps_done(run) >= 4)
            node = [second.pid, *children_of(second.pid)]
            for pid in node:
                os.kill(pid, signal.SIGKILL)
            second.wait()
        wait_for(lambda: "at world size 2; now 1" in log())
        # The first machine may have begun alone, so that it is not the first time that a second one comes.
        done, together = steps_done(run), log().count("; now 2")
        wait_for(lambda: steps_done(run) > done + 2)
        with started(*arguments, cwd=tmp_path, SAMESTEP_SECRET=SECRET) as again:
            wait_for(lambda: log().count("; now 2") > together)
            (tmp_path / "hurry").touch()
            output, _ = first.communicate(timeout=PATIENCE)
            joined, _ = again.communicate(timeout=PATIENCE)
        assert (first.returncode, again.returncode) == (0, 0), f"{output}\n{joined}"
    assert losses(run) == untouched
