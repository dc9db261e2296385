"""Which rank failed first, and what the launch ends with."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samestep.distributed.health.failure_report import FailureReport
from samestep.errors import RankFailed, SamestepError, Stopped
from samestep.launch.run.exit_report import ExitReport, after_signal, exit_report
from samestep.launch.run.rank_processes import RankProcess

TRACE = 'Traceback (most recent call last):\n  File "task.py", line 3, in loss\nValueError: boom\n'


def left_error(rank: int, message: str, when: float, trace: str = "", code: int = 1, **changes: Any) -> RankProcess:
    """A rank that could report its exception."""
    kind, _, text = message.partition(": ")
    ranks = changes.pop("ranks", ())
    report = FailureReport(kind, text, trace, ranks, when)
    return RankProcess(rank, process(rank), [report], code, when + 1, **changes)


def silent(rank: int, code: int, when: float = 0, **changes: Any) -> RankProcess:
    """A rank that ended silently."""
    return RankProcess(rank, process(rank), [], code, when, **changes)


def process(rank: int) -> Any:
    return SimpleNamespace(pid=500 + rank)


def report_on(folder: Path, *ranks: RankProcess) -> ExitReport:
    return exit_report(ranks, folder / "launch")


def test_the_rank_that_failed_by_itself_comes_first(tmp_path: Path) -> None:
    found = report_on(
        tmp_path,
        left_error(0, "PeerLost: rank 0: rank 2 on n1 failed first: ValueError: boom", 100),
        silent(1, -signal.SIGTERM, 100, stopped_by_us=True),
        left_error(2, "ValueError: boom", 101, TRACE),
    )
    host = socket.gethostname()
    log = tmp_path / "logs" / "rank-2.log"
    assert str(found.error).splitlines() == [
        f"rank 2 on {host} (pid 502) failed; its log: {log}; output of the ranks: {tmp_path / 'launch'}",
        *TRACE.splitlines(),
        "rank 0 (pid 500): rank 0: rank 2 on n1 failed first: ValueError: boom",
        "rank 1 (pid 501): ended by the launcher",
    ]
    assert isinstance(found.error, RankFailed)
    assert found.error.exit_code == 1
    assert found.headline == "rank 2 (pid 502): boom"
    assert found.lost == ()
    assert found.may_pass


def test_of_several_causes_the_earliest_is_the_first(tmp_path: Path) -> None:
    found = report_on(
        tmp_path,
        left_error(0, "KeyError: 'late'", 300, TRACE),
        left_error(3, "ValueError: early", 100, TRACE),
        left_error(1, "OSError: later", 200, TRACE),
    )
    order = [int(n) for n in re.findall(r"^rank (\d) (?:on .* failed|\(pid)", str(found.error), re.M)]
    assert order == [3, 1, 0]


def test_a_killed_rank_is_the_cause_and_is_lost(tmp_path: Path) -> None:
    found = report_on(
        tmp_path,
        left_error(0, "PeerLost: lost another rank: Connection closed", 100),
        silent(2, -signal.SIGKILL, 105),
        silent(1, -signal.SIGTERM, 101, stopped_by_us=True),
    )
    assert found.headline == "rank 2 (pid 502): ended by SIGKILL"
    assert "ended by SIGKILL" in str(found.error).splitlines()[1]
    assert found.lost == (2,)
    assert found.error.exit_code == 1
    assert found.may_pass


@pytest.mark.parametrize(
    ("code", "ours", "lost_too"),
    [
        (-signal.SIGSEGV, False, True),
        (-signal.SIGABRT, False, True),
        (-signal.SIGTERM, False, True),
        (-signal.SIGTERM, True, False),
        (-signal.SIGKILL, True, False),
        (1, False, False),
    ],
)
def test_crashed_ranks_are_lost_and_ended_ones_are_not(tmp_path: Path, code: int, ours: bool, lost_too: bool) -> None:
    other = silent(3, code, 2, stopped_by_us=ours)
    found = report_on(tmp_path, silent(0, -signal.SIGKILL, 1), other)
    assert found.lost == ((0, 3) if lost_too else (0,))


def test_if_all_only_lost_a_peer_the_first_of_them_is_shown(tmp_path: Path) -> None:
    found = report_on(
        tmp_path, left_error(0, "PeerLost: rank 0 lost a peer", 200), left_error(1, "PeerLost: rank 1 lost a peer", 100)
    )
    assert found.headline == "rank 1 (pid 501): rank 1 lost a peer"


@pytest.mark.parametrize(
    ("message", "code", "passes"),
    [
        ("ValueError: boom", 1, True),
        ("RankHung: a collective waited", 7, True),
        ("RanksDiffer: the ranks are not the same", 4, True),
        ("InitError: rank 0 of 2 could not open", 3, True),
        ("ConfigError: run.yaml has 1 mistake", 2, False),
        ("CheckpointError: no room", 2, False),
    ],
)
def test_the_exit_code_is_the_errors_own(tmp_path: Path, message: str, code: int, passes: bool) -> None:
    found = report_on(tmp_path, left_error(1, message, 100, TRACE))
    assert (found.error.exit_code, found.may_pass) == (code, passes)
    assert found.headline == f"rank 1 (pid 501): {message.partition(': ')[2]}"


def test_an_error_of_ours_needs_no_traceback(tmp_path: Path) -> None:
    text = str(report_on(tmp_path, left_error(1, "NonFiniteLoss: step 3", 1, TRACE)).error)
    assert text.splitlines()[1] == "step 3"
    assert "Traceback" not in text


def test_a_stop_is_no_failure_and_is_not_tried_again(tmp_path: Path) -> None:
    words = "SIGTERM on rank 1 stopped the run after step 6: it is saved"
    found = report_on(
        tmp_path, left_error(1, f"Stopped: {words}", 100, code=75), left_error(0, f"Stopped: {words}", 100, code=75)
    )
    assert isinstance(found.error, Stopped)
    assert (str(found.error), found.error.exit_code) == (words, 75)
    assert not found.may_pass
    assert found.lost == ()


def test_a_rank_that_ended_silently_is_reported_by_its_exit_code(tmp_path: Path) -> None:
    found = report_on(tmp_path, silent(0, 9))
    assert str(found.error).splitlines()[1] == "ended with exit code 9 and left no traceback"
    assert isinstance(found.error, SamestepError)


def test_a_rank_that_was_ended_has_recorded_the_cause_before(tmp_path: Path) -> None:
    found = report_on(
        tmp_path,
        left_error(0, "PeerLost: rank 0: rank 2 failed first", 101),
        left_error(2, "RankHung: a collective waited", 100, code=-signal.SIGTERM, stopped_by_us=True, ranks=(1,)),
        left_error(1, "PeerLost: this rank could not end by itself", 104),
    )
    assert found.error.exit_code == 7
    assert found.headline == "rank 1: a collective waited"
    host = socket.gethostname()
    first, second = str(found.error).splitlines()[:2]
    assert first.startswith(f"rank 1 hung, as rank 2 on {host} found; its log: ")
    assert "rank-1.log" in first
    assert second == "a collective waited"


def test_an_exit_code_of_0_alone_is_no_success(tmp_path: Path) -> None:
    found = report_on(tmp_path, silent(1, 0), left_error(0, "PeerLost: lost", 1))
    assert found.headline == (
        "rank 1 (pid 501): ended with exit code 0 before its run was over: something called os._exit"
    )
    over = RankProcess(0, process(0), [FailureReport(time=1)], 0, 2)
    assert over.has_succeeded
    assert not RankProcess(0, process(0), [FailureReport(time=1)], 1, 2).has_succeeded


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path: Path) -> None:
    number = signal.SIGRTMIN + 3
    assert report_on(tmp_path, silent(0, -number)).headline.endswith(f"ended by signal {number}")


STOPPED = "Stopped: SIGTERM on rank 0 stopped the run after step 6: it is saved"


@pytest.mark.parametrize(
    ("ranks", "kind", "code", "said"),
    [
        ([left_error(0, STOPPED, 1, code=75)], Stopped, 75, "it is saved"),
        ([silent(0, -signal.SIGKILL)], RankFailed, 143, "SIGTERM before it could be saved"),
        (
            [left_error(0, "PeerLost: x", 1), left_error(1, "ValueError: boom", 2)],
            RankFailed,
            143,
            "saved: ValueError: boom",
        ),
        ([], RankFailed, 143, "SIGTERM before it could be saved"),
    ],
    ids=["saved", "killed", "failed", "not started"],
)
def test_how_ranks_ended_after_a_signal(
    ranks: list[RankProcess], kind: type[SamestepError], code: int, said: str
) -> None:
    error = after_signal(signal.SIGTERM, ranks)
    assert type(error) is kind
    assert error.exit_code == code
    assert said in str(error)
