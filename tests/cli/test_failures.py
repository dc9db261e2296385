"""Failures under `samestep launch`: named by their cause, and nothing of the run is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.processes import children_of, is_alive, processes_of, samestep, started, wait_for, write_config
from tests.variations import variations


def write(folder: Path, task: str, **values: Any) -> Path:
    distributed = {"timeout": 6, **values.pop("distributed", {})}
    defaults = {"epochs": 2, "run_dir": str(folder / "run"), "log_every": 1, "distributed": distributed}
    return write_config(folder / "config.yaml", task, **{**defaults, **values})


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Whatever a test does to a run, soon after it no process of the run is there."""
    yield
    deadline = time.monotonic() + 20
    while (left := processes_of(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, [psutil.Process(pid).cmdline() for pid in left if psutil.pid_exists(pid)]


@pytest.mark.requirement("000-P4-8")
@pytest.mark.usefixtures("nothing_left")
def test_a_hang_names_the_rank_that_hangs(tmp_path: Path) -> None:
    done = samestep("launch", write(tmp_path, "SleepyData"), "--nproc", "3", cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    first = next(line for line in done.stderr.splitlines() if line.startswith("samestep: "))
    assert first.startswith("samestep: rank 1 hung, as rank ")
    assert "rank-1.log" in first
    assert " is in data loading at step 1 for " in done.stderr
    assert "time.sleep(10_000)" in done.stderr


@pytest.mark.variation("test_a_rank_that_skips_a_collective_is_named, under a launcher")
@pytest.mark.usefixtures("nothing_left")
def test_a_collective_of_the_users_that_others_do_not_call_is_named(tmp_path: Path) -> None:
    done = samestep("launch", write(tmp_path, "OwnCollective"), "--nproc", "3", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "the ranks called different collectives: rank 0 is in torch.distributed.all_reduce (" in (done.stderr)
    assert re.search(r"tasks\.py:\d+, in loss\)", done.stderr)
    assert "Connection closed by peer" not in done.stderr.splitlines()[1]


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_quits_with_code_0_has_failed(tmp_path: Path) -> None:
    done = samestep("launch", write(tmp_path, "Quits"), "--nproc", "2", cwd=tmp_path)
    assert done.returncode == 1
    assert "samestep: rank 1 on " in done.stderr
    assert "ended with exit code 0 before its run was over" in done.stderr


def stop(process: subprocess.Popen[str], pid: int) -> None:
    del process
    os.kill(pid, signal.SIGKILL)


def kill_launcher(process: subprocess.Popen[str], pid: int) -> None:
    del pid
    process.kill()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("how", variations([stop, kill_launcher], kept=[stop]), ids=["its rank", "the launcher"])
def test_a_worker_that_is_stuck_ends_with_what_started_it(
    tmp_path: Path, how: Callable[[subprocess.Popen[str], int], None]
) -> None:
    marker = tmp_path / "worker"
    config = write(
        tmp_path, "StuckWorker", params={"marker": str(marker)}, loader={"workers": 1}, distributed={"timeout": 20}
    )
    with started("launch", config, "--nproc", "2", cwd=tmp_path) as process:
        wait_for(lambda: marker.exists() and marker.read_text() != "")
        worker = int(marker.read_text())
        rank = psutil.Process(worker).ppid()
        assert rank in children_of(process.pid)
        how(process, rank)
        # A rank may save when its launcher was killed, and gets half a minute for it.
        wait_for(lambda: not is_alive(worker), 10 if how is stop else 50)
        if how is stop:
            output, _ = process.communicate(timeout=60)
            assert process.returncode == 1
            assert "ended by SIGKILL" in output


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = write(tmp_path, "Everything")
    done = samestep("launch", config, "launch.python=/no/such", "--nproc", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("samestep: /no/such cannot be started: No such file")


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A file system that is soon full."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(disk)]
    refused = subprocess.run(mount, capture_output=True, text=True, check=False)
    if refused.returncode:
        pytest.skip(f"no small disk can be made here: {refused.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="a small disk is made with Linux's tmpfs")
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("read_only", "message"), [(False, "No space left on device"), (True, "Read-only file system")]
)
def test_a_disk_that_takes_nothing_is_one_clear_error(tmp_path: Path, read_only: bool, message: str) -> None:
    with small_disk(tmp_path, 96) as disk:
        if read_only:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        config = write(tmp_path, "Everything", run_dir=str(disk / "run"), checkpoint={"every_steps": 1})
        done = samestep("launch", config, "--nproc", "2", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "JSONDecodeError" not in done.stderr
    assert not read_only or len(done.stderr.strip().splitlines()) == 1


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("kind", ["file", "dangling link", "user's files"])
def test_what_is_no_run_directory_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    config, run = write(tmp_path, "Everything"), tmp_path / "run"
    if kind == "file":
        run.write_text("mine")
    elif kind == "dangling link":
        run.symlink_to(tmp_path / "nowhere" / "at all")
    else:
        run.mkdir()
        (run / "config.json").write_text("mine")
    before = sorted(map(str, tmp_path.rglob("*")))
    for words in (("train", config), ("launch", config, "--nproc", "2")):
        done = samestep(*words, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        lines = done.stderr.strip().splitlines()
        assert sum(line.startswith("samestep: ") for line in lines) == 1, done.stderr
        assert words[0] == "train" or len(lines) == 1
        assert sorted(map(str, tmp_path.rglob("*"))) == before
