"""Heartbeats over a store that lives in this process: who failed, hangs, or is gone."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from samestep.distributed.health import heartbeat
from samestep.distributed.health.activity import COMPUTE, DATA, EXCHANGE, READING, Activity
from samestep.distributed.health.heartbeat import Heartbeat
from samestep.errors import CollectiveMismatch, PeerLost, RankHung
from tests.cli.processes import wait_for


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
    hearts = [
        Heartbeat(store, n, len(activities), activity, timeout, lost_after) for n, activity in enumerate(activities)
    ]
    try:
        wait_for(lambda: store.check([f"samestep/1/beat/{n}" for n in range(len(activities))]))
        yield hearts
    finally:
        for heart in hearts:
            heart.close()


def lost(words: str = "lost another rank: Connection closed by peer") -> PeerLost:
    return PeerLost(words)


def test_a_rank_that_failed_first_is_named_to_the_others() -> None:
    with beating([Activity(), Activity()]) as (mine, other):
        other.announce(ValueError("boom\nand more"))
        found = mine.explain(lost())
    assert isinstance(found, PeerLost)
    host = socket.gethostname()
    words, *trace = str(found).splitlines()
    assert words == f"rank 0: rank 1 on {host} failed first: ValueError: boom"
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
        found = mine.explain(PeerLost("lost another rank: Timed out waiting 800ms", timed_out=True))
    assert isinstance(found, RankHung)
    assert found.exit_code == 7
    lines = str(found).splitlines()
    assert lines[0] == "a collective waited longer than distributed.timeout (0.8 s)"
    assert any(re.fullmatch(r"rank 1 on .* \(pid \d+\) is in data loading at step 7 for 0 s", line) for line in lines)


def test_ranks_that_called_different_collectives_are_out_of_step() -> None:
    activities = [Activity(), Activity()]
    for activity, name in zip(activities, ("gradients", "gather"), strict=True):
        with activity.waiting("losses"), activity.waiting(name):
            pass
    with beating(activities, timeout=1.6) as (mine, _):
        found = mine.explain(lost())
    assert isinstance(found, CollectiveMismatch)
    assert "as #2: rank 0 called gradients; rank 1 called gather" in str(found)


def test_the_last_sign_of_a_rank_is_as_old_as_it_is() -> None:
    activities = [Activity(), Activity()]
    activities[1].enter(COMPUTE)
    with beating(activities) as (mine, other):
        other._moved -= 100  # a long step, but it was there a moment ago
        wait_for(lambda: other._now().seconds > 99)
        other._beat()
        other.stop()
        found = str(mine.explain(lost()))
    found = re.search(r"its last sign of life, (\d+) s ago, was from compute", found)
    assert found is not None, found
    assert int(found[1]) < 10


def test_a_rank_that_is_gone_is_named_with_a_short_timeout_too() -> None:
    activities = [Activity(), Activity()]
    activities[1].enter(COMPUTE)
    with beating(activities) as (mine, other):
        other.stop()
        found = str(mine.explain(lost()))
    assert "rank 1 on" in found


def test_a_rank_that_is_stuck_after_another_one_failed_ends_itself(
    ended: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "_SECONDS_TO_END", 0.2)
    activities = [Activity(), Activity()]
    activities[0].enter(COMPUTE)
    activities[0].step = 3
    with beating(activities) as (_, other):
        other.announce(ValueError("boom"))
        wait_for(lambda: bool(ended))
    assert ended[0] == 1
    assert re.search(
        r"this rank was in compute at step 3 for \d s and could not end by itself after "
        r"rank 1 on .* failed first: ValueError: boom",
        capfd.readouterr().err,
    )


@pytest.mark.parametrize("phase", [EXCHANGE, READING])
def test_a_collective_that_never_comes_back_ends_the_rank(
    ended: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], phase: str
) -> None:
    monkeypatch.setattr(heartbeat, "_SECONDS_TO_END", 0.2)
    activities = [Activity(), Activity()]
    activities[1].enter(DATA)
    activities[0].waiting("gradients", phase).__enter__()
    with beating(activities):
        wait_for(lambda: bool(ended))
    assert ended[0] == 7
    printed = capfd.readouterr().err
    assert "samestep: rank 0: a collective waited longer than distributed.timeout" in printed
    assert re.search(r"rank 1 on .* is in data loading at step 0", printed)


def test_a_rank_without_a_sign_of_life_is_lost_long_before_the_timeout(
    ended: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    activities = [Activity(), Activity(), Activity()]
    for activity in activities[1:]:
        activity.enter(COMPUTE)
    with beating(activities, timeout=60, lost_after=4) as hearts:
        mine, _, other = hearts
        for heart in hearts:
            heart._interval = 0.2
        activities[0].waiting("gradients").__enter__()
        other.stop()  # its machine is gone, silently; the third rank only takes its time
        wait_for(lambda: bool(ended))
        assert mine._store.read("failed") is not None, "those who wait for it as well learn of it"
    assert ended[0] == PeerLost.exit_code
    printed = capfd.readouterr().err
    assert re.search(r"no sign of life for 4 s: rank 2 on .* from compute", printed)
    assert "rank 1 on" not in printed


def test_ranks_that_are_busy_for_long_are_not_lost(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    activities = [Activity(), Activity()]
    activities[1].enter(COMPUTE)
    looks: list[int] = []
    with beating(activities, timeout=60, lost_after=2) as hearts:
        waiting, beats_of_all = hearts[0], hearts[0].beats
        monkeypatch.setattr(waiting, "beats", lambda: looks.append(1) or beats_of_all())
        for heart in hearts:
            heart._interval = 0.2
        activities[0].waiting("gradients").__enter__()
        wait_for(lambda: len(looks) > 1)  # the second look compares with the first
    assert not ended


def test_a_long_step_of_our_own_is_no_hang(ended: list[int]) -> None:
    activities = [Activity(), Activity()]
    for activity in activities:
        activity.enter(COMPUTE)
    with beating(activities, timeout=0.4) as hearts:
        for heart in hearts:
            heart._moved -= 1000
        wait_for(lambda: min(heart._number for heart in hearts) > 8)
    assert not ended


def test_a_rank_is_gone_once_it_is_silent_and_its_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while it beats: in another container it has the same host, and a process id of its own."""
    monkeypatch.setattr(heartbeat, "process_state", lambda pid: "gone")
    with beating([Activity(), Activity()]) as (mine, other):
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            assert not mine.is_gone(1)
            time.sleep(0.05)
        other.stop()
        wait_for(lambda: mine.is_gone(1))


def test_a_rank_that_only_falls_silent_is_gone_after_a_while() -> None:
    with beating([Activity(), Activity()], lost_after=1.0) as (mine, other):
        assert not mine.is_gone(1)
        other.stop()
        began = time.monotonic()
        wait_for(lambda: mine.is_gone(1))
        assert time.monotonic() - began > 0.8
