"""Who waits for whom: the report on a hang."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from samestep.distributed.health.activity import COMPUTE, DATA, EXCHANGE, SAVE
from samestep.distributed.health.hang_report import Beat, different_calls, hang_report, process_state


def beat(rank: int, phase: str = EXCHANGE, age: float = 0.0, **changes: Any) -> Beat:
    """A rank's last sign; one with an age did not move while we looked."""
    values: dict[str, Any] = {
        "rank": rank,
        "host": f"n{rank // 2 + 1}",
        "pid": 74 + rank,
        "step": 120,
        "phase": phase,
        "seconds": 184.2,
        "collective": "gradients",
        "sequence": 481,
        "time": time.time() - age,
        "silent": age > 0,
    }
    return Beat(**{**values, **changes})


SAME = {rank: [(480, "losses"), (481, "gradients")] for rank in range(4)}


def test_a_rank_that_others_wait_for_is_named_with_its_place() -> None:
    beats = [beat(0), beat(1), beat(2), beat(3, DATA, sequence=480)]
    stacks = {0: "stack of 0", 3: '  File "task.py", line 9, in __getitem__\n'}
    assert hang_report(beats, stacks, SAME, 180.0).splitlines() == [
        "a collective waited longer than distributed.timeout (180 s)",
        "rank 3 on n2 (pid 77) is in data loading at step 120 for 184 s",
        "ranks 0-2 wait in gradients #481 for 184 s",
        "rank 3's Python stack (most recent call last):",
        '  File "task.py", line 9, in __getitem__',
    ]


def test_a_silent_rank_is_not_taken_for_a_busy_one() -> None:
    beats = [beat(0), beat(1, COMPUTE, age=9.0), beat(2, age=9.0, process="stopped"), beat(3, seconds=5)]
    assert hang_report(beats, {}, {}, 2.5).splitlines() == [
        "a collective waited longer than distributed.timeout (2.5 s)",
        "rank 1 on n1 (pid 75) has ended, is stopped, or holds the interpreter; its last sign of life, "
        "9 s ago, was from compute at step 120",
        "rank 2 on n2 (pid 76) is stopped (SIGSTOP, or a debugger); its last sign of life, 9 s ago, was "
        "from gradients #481 at step 120",
        "ranks 0, 3 wait in gradients #481 for 184 s",
    ]


def test_ranks_that_wait_in_different_calls_are_listed_apart() -> None:
    beats = [beat(0), beat(1, collective="losses", sequence=480), beat(2), beat(3)]
    assert hang_report(beats, {}, {}, 60.0).splitlines()[1:] == [
        "ranks 0, 2-3 wait in gradients #481 for 184 s",
        "rank 1 waits in losses #480 for 184 s",
    ]


def test_the_longest_wait_of_a_group_is_reported() -> None:
    beats = [beat(0, seconds=3.0), beat(1, seconds=61.0)]
    assert hang_report(beats, {}, {}, 60.0).splitlines()[1:] == ["ranks 0-1 wait in gradients #481 for 61 s"]


def test_different_collectives_are_reported_before_anything_else() -> None:
    beats = [beat(0), beat(1, collective="gather")]
    calls = {0: [(481, "gradients")], 1: [(481, "gather")]}
    stacks = {0: "stack of 0", 1: "stack of 1"}
    assert hang_report(beats, stacks, calls, 60.0).splitlines() == [
        "a collective waited longer than distributed.timeout (60 s)",
        "the ranks called different collectives as #481: rank 0 called gradients; rank 1 called gather",
        "rank 1 waits in gather #481 for 184 s",
        "rank 0 waits in gradients #481 for 184 s",
        "rank 0's Python stack (most recent call last):",
        "stack of 0",
        "rank 1's Python stack (most recent call last):",
        "stack of 1",
    ]


def test_stacks_of_those_who_only_wait_are_left_out() -> None:
    stacks = {rank: f"stack of {rank}" for rank in range(4)}
    beats = [beat(0), beat(1), beat(2, SAVE), beat(3, age=10.0)]
    text = hang_report(beats, stacks, SAME, 60.0)
    assert [rank for rank in range(4) if f"stack of {rank}" in text] == [2, 3]
    assert "stack of" not in hang_report([beat(0), beat(1)], stacks, SAME, 60.0)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ({}, None),
        (SAME, None),
        ({0: [(1, "a"), (2, "b")], 1: [(1, "a")]}, None),  # one is behind: no mismatch
        ({0: [(1, "a")], 1: [(2, "b")]}, None),
        (
            {0: [(1, "a"), (2, "b")], 1: [(1, "a"), (2, "c")], 2: [(1, "a"), (2, "b")]},
            "the ranks called different collectives as #2: ranks 0, 2 called b; rank 1 called c",
        ),
        (
            {0: [(6, "y"), (5, "x")], 1: [(6, "z"), (5, "w")]},
            "the ranks called different collectives as #5: rank 0 called x; rank 1 called w",
        ),
        (
            {rank: [(9, "save" if rank in (3, 4, 5, 8) else "losses")] for rank in range(9)},
            "the ranks called different collectives as #9: ranks 0-2, 6-7 called losses; ranks 3-5, 8 called save",
        ),
    ],
)
def test_the_first_call_that_differs_is_named(calls: dict[int, list[tuple[int, str]]], words: str | None) -> None:
    assert different_calls(calls) == words


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the kernel tells it in /proc")
def test_what_a_silent_process_does_is_known_on_its_machine() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert process_state(process.pid) == "running"
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while process_state(process.pid) != "stopped":
            assert time.monotonic() < deadline
        process.kill()
        while process_state(process.pid) != "gone":
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.communicate()
    assert process_state(process.pid) == "gone"
