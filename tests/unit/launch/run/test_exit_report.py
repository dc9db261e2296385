"""Which rank failed first, and what the launch ends with."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from samestep.errors import RankFailed, SamestepError, Stopped
from samestep.launch.run.exit_report import ExitReport, read_failures

TRACE = 'Traceback (most recent call last):\n  File "task.py", line 3, in loss\nValueError: boom\n'


def left_error(
    folder: Path, rank: int, message: str, when: int, trace: str = "", code: int = 1
) -> ProcessFailure:
    """A rank that could leave its exception to the agent."""
    path = folder / f"error-{rank}.json"
    extra = {"py_callstack": trace, "timestamp": str(when)}
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    return ProcessFailure(rank, 500 + rank, code, str(path))


def silent(rank: int, code: int, when: int = 0) -> ProcessFailure:
    """A rank that ended silently."""
    failure = ProcessFailure(rank, 500 + rank, code, "<N/A>")
    failure.timestamp = when
    return failure


def report_on(folder: Path, *failures: ProcessFailure, ranks: int = 4) -> ExitReport:
    launch = folder / "launch"
    return read_failures({failure.local_rank: failure for failure in failures}, ranks, launch)


def test_the_rank_that_failed_by_itself_comes_first(tmp_path: Path) -> None:
    found = report_on(
        tmp_path,
        left_error(
            tmp_path, 0, "PeerLost: rank 0: rank 2 on n1 failed first: ValueError: boom", 100
        ),
        silent(1, -signal.SIGTERM, 100),
        left_error(tmp_path, 2, "ValueError: boom", 101, TRACE),
    )
    host = socket.gethostname()
    log = tmp_path / "logs" / "rank-2.log"
    assert str(found.error).splitlines() == [
        f"rank 2 on {host} (pid 502) failed; its log: {log}; output of the ranks: "
        f"{tmp_path / 'launch'}",
        *TRACE.splitlines(),
        "rank 0 (pid 500): rank 0: rank 2 on n1 failed first: ValueError: boom",
        "rank 1 (pid 501): ended by SIGTERM",
        "rank 3: ended by the launcher",
    ]
    assert isinstance(found.error, RankFailed)
    assert found.error.exit_code == 1
    assert found.headline == "rank 2 (pid 502): boom"
    assert found.lost == ()
    assert found.may_pass


def test_of_several_causes_the_earliest_is_the_first(tmp_path: Path) -> None:
    found = report_on(
        tmp_path,
        left_error(tmp_path, 0, "KeyError: 'late'", 300, TRACE),
        left_error(tmp_path, 3, "ValueError: early", 100, TRACE),
        left_error(tmp_path, 1, "OSError: later", 200, TRACE),
    )
    order = [
        int(n) for n in re.findall(r"^rank (\d) (?:on .* failed|\(pid)", str(found.error), re.M)
    ]
    assert order == [3, 1, 0]


def test_a_killed_rank_is_the_cause_and_is_lost(tmp_path: Path) -> None:
    found = report_on(
        tmp_path,
        left_error(tmp_path, 0, "PeerLost: lost another rank: Connection closed", 100),
        silent(2, -signal.SIGKILL, 105),
        silent(1, -signal.SIGTERM, 101),
    )
    assert found.headline == "rank 2 (pid 502): ended by SIGKILL"
    assert "ended by SIGKILL" in str(found.error).splitlines()[1]
    assert found.lost == (2,)
    assert found.error.exit_code == 1
    assert found.may_pass


@pytest.mark.parametrize(
    ("code", "lost_too"),
    [(-signal.SIGSEGV, True), (-signal.SIGABRT, True), (-signal.SIGTERM, False), (1, False)],
)
def test_crashed_ranks_are_lost_and_ended_ones_are_not(
    tmp_path: Path, code: int, lost_too: bool
) -> None:
    found = report_on(tmp_path, silent(0, -signal.SIGKILL, 1), silent(3, code, 2))
    assert found.lost == ((0, 3) if lost_too else (0,))


def test_if_all_only_lost_a_peer_the_first_of_them_is_shown(tmp_path: Path) -> None:
    found = report_on(
        tmp_path,
        left_error(tmp_path, 0, "PeerLost: rank 0 lost a peer", 200),
        left_error(tmp_path, 1, "PeerLost: rank 1 lost a peer", 100),
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
def test_the_exit_code_is_the_errors_own(
    tmp_path: Path, message: str, code: int, passes: bool
) -> None:
    found = report_on(tmp_path, left_error(tmp_path, 1, message, 100, TRACE))
    assert (found.error.exit_code, found.may_pass) == (code, passes)
    assert found.headline == f"rank 1 (pid 501): {message.partition(': ')[2]}"


def test_an_error_of_ours_needs_no_traceback(tmp_path: Path) -> None:
    text = str(
        report_on(tmp_path, left_error(tmp_path, 1, "NonFiniteLoss: step 3", 1, TRACE)).error
    )
    assert text.splitlines()[1] == "step 3"
    assert "Traceback" not in text


def test_a_stop_is_no_failure_and_is_not_tried_again(tmp_path: Path) -> None:
    words = "SIGTERM on rank 1 stopped the run after step 6: it is saved"
    found = report_on(
        tmp_path,
        left_error(tmp_path, 1, f"Stopped: {words}", 100, code=75),
        left_error(tmp_path, 0, f"Stopped: {words}", 100, code=75),
    )
    assert isinstance(found.error, Stopped)
    assert (str(found.error), found.error.exit_code) == (words, 75)
    assert not found.may_pass
    assert found.lost == ()


def test_a_rank_that_ended_silently_is_reported_by_its_exit_code(tmp_path: Path) -> None:
    found = report_on(tmp_path, silent(0, 9), ranks=1)
    assert str(found.error).splitlines()[1] == "ended with exit code 9 and left no traceback"
    assert isinstance(found.error, SamestepError)


def test_a_message_of_one_text_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": "ValueError: boom", "timestamp": 5}))
    found = report_on(tmp_path, ProcessFailure(0, 500, 1, str(path)))
    assert found.headline == "rank 0 (pid 500): boom"
