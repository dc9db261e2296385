"""Heartbeats, hang reports and activities, without any real rank."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from samestep.distributed.health import heartbeat as heartbeat_module
from samestep.distributed.health.activity import (
    COMPUTE,
    DATA,
    EXCHANGE,
    READING,
    SAVE,
    STARTING,
    Activity,
)
from samestep.distributed.health.hang_report import Beat, different_calls, hang_report
from samestep.distributed.health.heartbeat import Heartbeat
from samestep.errors import (
    CollectiveMismatch,
    PeerLost,
    RankHung,
)
from tests.unit.clock import Clock

# -- a hang ---------------------------------------------------------------------------------------


def beat(rank: int, phase: str = EXCHANGE, age: float = 0.0, **changes: Any) -> Beat:
    """A rank's last sign; one with an age did not move while we looked."""
    fields: dict[str, Any] = {
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
    return Beat(**{**fields, **changes})


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


def test_a_silent_rank_is_distinguished_from_a_busy_one() -> None:
    beats = [beat(0), beat(1, COMPUTE, age=9.0), beat(2, age=9.0), beat(3, seconds=5)]
    assert hang_report(beats, {}, {}, 2.5).splitlines() == [
        "a collective waited longer than distributed.timeout (2.5 s)",
        "rank 1 on n1 (pid 75) gave its last sign of life 9 s ago in compute at step 120: it has ended, "
        "is stopped, or holds the interpreter",
        "rank 2 on n2 (pid 76) gave its last sign of life 9 s ago in gradients #481 at step 120: it has "
        "ended, is stopped, or holds the interpreter",
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
    assert hang_report(beats, {}, {}, 60.0).splitlines()[1:] == [
        "ranks 0-1 wait in gradients #481 for 61 s"
    ]


def test_different_collectives_are_reported_first() -> None:
    beats = [beat(0), beat(1, collective="gather")]
    calls = {0: [(481, "gradients")], 1: [(481, "gather")]}
    stacks = {0: "stack of 0", 1: "stack of 1"}
    assert hang_report(beats, stacks, calls, 60.0).splitlines() == [
        "a collective waited longer than distributed.timeout (60 s)",
        "the ranks called different collectives as #481: rank 0 called gradients; rank 1 called "
        "gather",
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
    ("calls", "message"),
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
            "the ranks called different collectives as #9: ranks 0-2, 6-7 called losses; "
            "ranks 3-5, 8 called save",
        ),
    ],
)
def test_the_first_call_that_differs_is_named(
    calls: dict[int, list[tuple[int, str]]], message: str | None
) -> None:
    assert different_calls(calls) == message


# -- heartbeats over a store that lives in this process -------------------------------------------


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes of ranks that end themselves: here they must not end all tests."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


@contextmanager
def beating(
    activities: Sequence[Activity], timeout: float = 0.8, lost_after: float = 60.0
) -> Iterator[list[Heartbeat]]:
    """One heartbeat an activity, as if each were a rank."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    heartbeats = [
        Heartbeat(store, n, len(activities), activity, timeout, lost_after)
        for n, activity in enumerate(activities)
    ]
    try:
        until(lambda: store.check([f"samestep/1/beat/{n}" for n in range(len(activities))]))
        yield heartbeats
    finally:
        for heartbeat in heartbeats:
            heartbeat.close()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lost(message: str = "lost another rank: Connection closed by peer") -> PeerLost:
    return PeerLost(message)


def test_a_rank_that_failed_first_is_named_to_the_others() -> None:
    with beating([Activity(), Activity()]) as (mine, other):
        other.announce(ValueError("boom\nand more"))
        error = mine.explain(lost())
    assert isinstance(error, PeerLost)
    host = socket.gethostname()
    headline, *trace = str(error).splitlines()
    assert headline == f"rank 0: rank 1 on {host} failed first: ValueError: boom"
    assert trace == ["ValueError: boom", "and more"], "its traceback travels too"


def test_of_two_that_fail_the_first_one_counts() -> None:
    with beating([Activity(), Activity(), Activity()]) as (mine, second, third):
        third.announce(KeyError("x"))
        second.announce(ValueError("boom"))
        assert "rank 2" in str(mine.explain(lost()))


def test_a_collective_that_timed_out_is_a_hang_with_a_report() -> None:
    activities = [Activity(), Activity()]
    activities[1].enter(DATA)
    activities[1].step = 7
    with beating(activities) as (mine, _):
        error = mine.explain(lost("lost another rank: Timed out waiting 800ms"))
    assert isinstance(error, RankHung)
    assert error.exit_code == 7
    lines = str(error).splitlines()
    assert lines[0] == "a collective waited longer than distributed.timeout (0.8 s)"
    assert any(re.fullmatch(r"rank 1 on .* \(pid \d+\) is in data loading at step 7 for 0 s", line)
               for line in lines)  # fmt: skip


def test_ranks_that_called_different_collectives_are_out_of_step() -> None:
    activities = [Activity(), Activity()]
    for activity, name in zip(activities, ("gradients", "gather"), strict=True):
        with activity.waiting("losses"), activity.waiting(name):
            pass
    with beating(activities, timeout=1.6) as (mine, _):
        error = mine.explain(lost())
    assert isinstance(error, CollectiveMismatch)
    assert "as #2: rank 0 called gradients; rank 1 called gather" in str(error)


def test_the_last_sign_of_a_rank_is_as_old_as_it_is() -> None:
    activities = [Activity(), Activity()]
    activities[1].enter(COMPUTE)
    with beating(activities) as (mine, other):
        other._moved -= 100  # a long step, but it was there a moment ago
        until(lambda: other._now().seconds > 99)
        other._beat()
        other.stop()
        error = str(mine.explain(lost()))
    found = re.search(r"gave its last sign of life (\d+) s ago in compute", error)
    assert found is not None, error
    assert int(found[1]) < 10


def test_a_rank_that_is_gone_is_named_with_a_short_timeout_too() -> None:
    activities = [Activity(), Activity()]
    activities[1].enter(COMPUTE)
    with beating(activities) as (mine, other):
        other.stop()
        error = str(mine.explain(lost()))
    assert "rank 1 on" in error


def test_a_rank_that_is_stuck_after_another_one_failed_ends_itself(
    ended: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat_module, "_SECONDS_TO_END", 0.2)
    activities = [Activity(), Activity()]
    activities[0].enter(COMPUTE)
    activities[0].step = 3
    with beating(activities) as (_, other):
        other.announce(ValueError("boom"))
        until(lambda: bool(ended))
    assert ended[0] == 1
    assert re.search(
        r"this rank was in compute at step 3 for \d s and could not end by itself after "
        r"rank 1 on .* failed first: ValueError: boom",
        capfd.readouterr().err,
    )


@pytest.mark.parametrize("phase", [EXCHANGE, READING])
def test_a_collective_that_never_comes_back_ends_the_rank(
    ended: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    phase: str,
) -> None:
    monkeypatch.setattr(heartbeat_module, "_SECONDS_TO_END", 0.2)
    activities = [Activity(), Activity()]
    activities[1].enter(DATA)
    activities[0].waiting("gradients", phase).__enter__()
    with beating(activities):
        until(lambda: bool(ended))
    assert ended[0] == 7
    printed = capfd.readouterr().err
    assert "samestep: rank 0: a collective waited longer than distributed.timeout" in printed
    assert re.search(r"rank 1 on .* is in data loading at step 0", printed)


def test_a_silent_rank_is_lost_long_before_the_timeout(
    ended: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    activities = [Activity(), Activity(), Activity()]
    for activity in activities[1:]:
        activity.enter(COMPUTE)
    with beating(activities, timeout=60, lost_after=4) as heartbeats:
        mine, _, other = heartbeats
        for heartbeat in heartbeats:
            heartbeat._interval = 0.2
        activities[0].waiting("gradients").__enter__()
        other.stop()  # its machine is gone, and silent; the third rank is only slow
        until(lambda: bool(ended))
        assert mine._store.read("failed") is not None, "those who wait for it as well learn of it"
    assert ended[0] == PeerLost.exit_code
    printed = capfd.readouterr().err
    assert re.search(r"no sign of life for 4 s: rank 2 on .* in compute", printed)
    assert "rank 1 on" not in printed


def test_ranks_that_are_busy_for_long_are_not_lost(
    ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    activities = [Activity(), Activity()]
    activities[1].enter(COMPUTE)
    looks: list[int] = []
    with beating(activities, timeout=60, lost_after=2) as heartbeats:
        waiting, beats_of_all = heartbeats[0], heartbeats[0]._beats
        monkeypatch.setattr(waiting, "_beats", lambda: looks.append(1) or beats_of_all())
        for heartbeat in heartbeats:
            heartbeat._interval = 0.2
        activities[0].waiting("gradients").__enter__()
        until(lambda: len(looks) > 1)  # the second look compares with the first
    assert not ended


def test_a_long_step_of_this_rank_is_no_hang(ended: list[int]) -> None:
    activities = [Activity(), Activity()]
    for activity in activities:
        activity.enter(COMPUTE)
    with beating(activities, timeout=0.4) as heartbeats:
        for heartbeat in heartbeats:
            heartbeat._moved -= 1000
        until(lambda: min(heartbeat._number for heartbeat in heartbeats) > 8)
    assert not ended


# -- the activity ------------------------------------------------------------------------------------


def test_the_phases_add_up_to_the_time_that_passed(clock: Clock) -> None:
    activity = Activity()
    activity.begin_step(0)
    for phase, seconds in [(DATA, 1), (COMPUTE, 2), (EXCHANGE, 4), (COMPUTE, 8), (SAVE, 16)]:
        assert activity.enter(phase) in activity.seconds
        clock.now += seconds
    activity.end_step()
    clock.now += 100
    spent = {phase: seconds for phase, seconds in activity.seconds.items() if seconds}
    assert spent == {DATA: 1, COMPUTE: 10, EXCHANGE: 4, SAVE: 16}
    assert activity.busy == 11


def test_only_some_steps_are_timed(clock: Clock) -> None:
    activity = Activity()
    for step in range(17):
        activity.begin_step(step)
        activity.enter(DATA)
        clock.now += 1
        activity.enter(COMPUTE)
        activity.end_step()
    assert (activity.timed_steps, activity.seconds[DATA]) == (3, 3.0)
    with activity.during(SAVE):  # but this always is
        clock.now += 5
    assert activity.seconds[SAVE] == 5


def test_a_phase_inside_another_gives_it_back(clock: Clock) -> None:
    activity = Activity()
    assert activity.phase == STARTING
    activity.begin_step(0)
    with activity.during(SAVE):
        clock.now += 1
        with activity.waiting("broadcast"):
            assert activity.phase == EXCHANGE
            clock.now += 2
        assert activity.phase == SAVE
        clock.now += 4
    assert activity.phase == COMPUTE
    assert (activity.seconds[SAVE], activity.seconds[EXCHANGE], activity.seconds[COMPUTE]) == (
        5,
        2,
        0,
    )


def test_what_failed_stays_where_it_failed() -> None:
    activity = Activity()
    with pytest.raises(KeyError), activity.during(SAVE), activity.during(READING):
        raise KeyError
    assert activity.phase == READING


def test_collectives_are_numbered_and_remembered() -> None:
    activity = Activity()
    for number in range(100):
        with activity.waiting(f"call {number}"):
            pass
    assert (activity.sequence, activity.collective) == (100, "call 99")
    assert list(activity.recent) == [(number + 1, f"call {number}") for number in range(36, 100)]
    with activity.waiting("call 99"), activity.waiting("another"):
        assert (activity.sequence, activity.collective) == (102, "another")
    assert list(activity.recent)[-2:] == [(101, "call 99"), (102, "another")]
    assert list(Activity().recent) == []
    assert Activity().collective == ""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo] Connection closed by peer"),
        RuntimeError("NCCL error: remote process exited"),
        RuntimeError("Timed out waiting 1000ms for recv operation to complete"),
    ],
)
def test_a_broken_connection_becomes_a_lost_peer(error: RuntimeError) -> None:
    activity = Activity()
    with pytest.raises(PeerLost, match="lost another rank: ") as caught, activity.waiting("losses"):
        raise error
    assert caught.value.__cause__ is error
    assert activity.phase == EXCHANGE


@pytest.mark.parametrize("error", [ValueError("gloo"), RuntimeError("shapes do not match")])
def test_an_error_of_our_own_in_a_collective_stays_itself(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, Activity().waiting("losses"):
        raise error
    assert caught.value is error
