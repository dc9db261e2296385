"""Ranks as processes: what they report, what they leave, and what ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from samestep.launch.run import reaper as reaper_program
from samestep.launch.run.orphans import Reaper
from samestep.launch.run.rank_processes import RankProcesses
from tests.cli.processes import is_alive, wait_for

REPORTS = (
    "import os; number = int(os.environ['SAMESTEP_REPORT_PIPE'].split(':')[0]); "
    """os.write(number, b'{"kind": "%s", "message": "m", "trace": "", "ranks": [], "time": 1}\\n')"""
)
SLEEPS = "import time; time.sleep(600)"
LEAVES_A_CHILD = (
    f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', '{SLEEPS}']); "
    "print(child.pid, flush=True)"
)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[RankProcesses]:
    reaper = Reaper(1.0)
    found = RankProcesses(tmp_path, reaper)
    yield found
    found.end(0.0)
    reaper.close()


def start(processes: RankProcesses, code: str, rank: int = 0) -> int:
    return processes.start(rank, [sys.executable, "-c", code], os.environ, redirected=True)


def test_only_a_rank_that_says_so_has_succeeded(processes: RankProcesses) -> None:
    start(processes, REPORTS % "", 0)
    start(processes, "pass", 1)
    start(processes, REPORTS % "ValueError", 2)
    assert processes.wait(30)
    assert [rank.has_succeeded for rank in processes.ranks] == [True, False, False]
    assert [rank.rank for rank in processes.failed] == [1, 2]
    failure = processes.ranks[2].failure
    assert failure is not None
    assert (failure.kind, failure.message) == ("ValueError", "m")


def test_what_a_rank_printed_is_kept_and_what_it_started_ends_with_it(processes: RankProcesses, tmp_path: Path) -> None:
    start(processes, LEAVES_A_CHILD, 3)
    assert processes.wait(30)
    child = int((tmp_path / "rank-3.out").read_text())
    wait_for(lambda: not is_alive(child), 20)


def test_ranks_get_time_to_end_and_are_then_killed(processes: RankProcesses) -> None:
    start(processes, f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}")
    time.sleep(0.5)
    processes.end(0.5)
    [rank] = processes.ranks
    assert rank.code in (-signal.SIGKILL, -signal.SIGTERM)
    assert rank.stopped_by_us


def test_the_reaper_ends_groups_when_its_input_does() -> None:
    children = [subprocess.Popen([sys.executable, "-c", SLEEPS], start_new_session=True) for _ in range(2)]
    reaper = Reaper(5.0)
    for child in children:
        reaper.watch(child.pid)
    reaper.forget(children[1].pid)
    reaper._process.stdin.close()  # type: ignore[union-attr]
    assert children[0].wait(20) == -signal.SIGTERM
    assert children[1].poll() is None, "its launcher has seen its end"
    children[1].kill()
    children[1].wait()
    assert reaper._process.wait(20) == 0


def test_a_group_that_does_not_end_is_killed() -> None:
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); {SLEEPS}"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    child.stdout.readline()
    reaper_program.end_groups({child.pid: signal.SIGTERM}, 0.3)
    assert child.wait(20) == -signal.SIGKILL
    child.stdout.close()
