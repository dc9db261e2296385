"""Who is where, who failed first, and what a signal does: all without a single rank."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from samestep.config import load_config
from samestep.distributed.deferred_signals import DeferredSignals
from samestep.distributed.health import heartbeat
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
from samestep.distributed.signals import STOPPING, AgreedAction, StopSignals
from samestep.errors import (
    CollectiveMismatch,
    LaunchError,
    PeerLost,
    RankFailed,
    RankHung,
    SamestepError,
    Stopped,
)
from samestep.launch.commands.local import local_launch
from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.commands.size import Size
from samestep.launch.run.exit_report import ExitReport, read_failures
from tests.unit.clock import Clock

# -- a hang ---------------------------------------------------------------------------------------


def beat(rank: int, phase: str = EXCHANGE, age: float = 0.0, **changes: Any) -> Beat:
    """A rank's last sign; one with an age did not move while we looked."""
    said: dict[str, Any] = {
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
    return Beat(**{**said, **changes})


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


def test_a_silent_rank_is_told_from_a_busy_one() -> None:
    beats = [beat(0), beat(1, COMPUTE, age=9.0), beat(2, age=9.0), beat(3, seconds=5)]
    assert hang_report(beats, {}, {}, 2.5).splitlines() == [
        "a collective waited longer than distributed.timeout (2.5 s)",
        "rank 1 on n1 (pid 75) gave its last sign 9 s ago in compute at step 120: it has ended, "
        "is stopped, or holds the interpreter",
        "rank 2 on n2 (pid 76) gave its last sign 9 s ago in gradients #481 at step 120: it has "
        "ended, is stopped, or holds the interpreter",
        "ranks 0, 3 wait in gradients #481 for 184 s",
    ]


def test_ranks_that_wait_in_different_calls_are_told_apart() -> None:
    beats = [beat(0), beat(1, collective="losses", sequence=480), beat(2), beat(3)]
    assert hang_report(beats, {}, {}, 60.0).splitlines()[1:] == [
        "ranks 0, 2-3 wait in gradients #481 for 184 s",
        "rank 1 waits in losses #480 for 184 s",
    ]


def test_the_longest_wait_of_a_group_is_told() -> None:
    beats = [beat(0, seconds=3.0), beat(1, seconds=61.0)]
    assert hang_report(beats, {}, {}, 60.0).splitlines()[1:] == [
        "ranks 0-1 wait in gradients #481 for 61 s"
    ]


def test_different_collectives_are_told_before_anything_else() -> None:
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
            "the ranks called different collectives as #9: ranks 0-2, 6-7 called losses; "
            "ranks 3-5, 8 called save",
        ),
    ],
)
def test_the_first_call_that_differs_is_named(
    calls: dict[int, list[tuple[int, str]]], words: str | None
) -> None:
    assert different_calls(calls) == words


# -- heartbeats over a store that lives in this process -------------------------------------------


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes of ranks that end themselves: here they must not end all tests."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


@contextmanager
def beating(
    pulses: Sequence[Activity], timeout: float = 0.8, lost_after: float = 60.0
) -> Iterator[list[Heartbeat]]:
    """One heartbeat an activity, as if each were a rank."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    hearts = [
        Heartbeat(store, n, len(pulses), activity, timeout, lost_after)
        for n, activity in enumerate(pulses)
    ]
    try:
        until(lambda: store.check([f"samestep/1/beat/{n}" for n in range(len(pulses))]))
        yield hearts
    finally:
        for heart in hearts:
            heart.close()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lost(words: str = "lost another rank: Connection closed by peer") -> PeerLost:
    return PeerLost(words)


def test_a_rank_that_failed_first_is_named_to_the_others() -> None:
    with beating([Activity(), Activity()]) as (mine, other):
        other.announce(ValueError("boom\nand more"))
        told = mine.explain(lost())
    assert isinstance(told, PeerLost)
    host = socket.gethostname()
    words, *trace = str(told).splitlines()
    assert words == f"rank 0: rank 1 on {host} failed first: ValueError: boom"
    assert trace == ["ValueError: boom", "and more"], "its traceback travels too"


def test_of_two_that_fail_the_first_one_counts() -> None:
    with beating([Activity(), Activity(), Activity()]) as (mine, second, third):
        third.announce(KeyError("x"))
        second.announce(ValueError("boom"))
        assert "rank 2" in str(mine.explain(lost()))


def test_a_collective_that_timed_out_is_a_hang_with_a_report() -> None:
    pulses = [Activity(), Activity()]
    pulses[1].enter(DATA)
    pulses[1].step = 7
    with beating(pulses) as (mine, _):
        told = mine.explain(lost("lost another rank: Timed out waiting 800ms"))
    assert isinstance(told, RankHung)
    assert told.exit_code == 7
    lines = str(told).splitlines()
    assert lines[0] == "a collective waited longer than distributed.timeout (0.8 s)"
    assert any(re.fullmatch(r"rank 1 on .* \(pid \d+\) is in data loading at step 7 for 0 s", line)
               for line in lines)  # fmt: skip


def test_ranks_that_called_different_collectives_are_out_of_step() -> None:
    pulses = [Activity(), Activity()]
    for activity, name in zip(pulses, ("gradients", "gather"), strict=True):
        with activity.waiting("losses"), activity.waiting(name):
            pass
    with beating(pulses, timeout=1.6) as (mine, _):
        told = mine.explain(lost())
    assert isinstance(told, CollectiveMismatch)
    assert "as #2: rank 0 called gradients; rank 1 called gather" in str(told)


def test_the_last_sign_of_a_rank_is_as_old_as_it_is() -> None:
    pulses = [Activity(), Activity()]
    pulses[1].enter(COMPUTE)
    with beating(pulses) as (mine, other):
        other._moved -= 100  # a long step, but it was there a moment ago
        until(lambda: other._now().seconds > 99)
        other._beat()
        other.stop()
        told = str(mine.explain(lost()))
    found = re.search(r"gave its last sign (\d+) s ago in compute", told)
    assert found is not None, told
    assert int(found[1]) < 10


def test_a_rank_that_is_gone_is_named_with_a_short_timeout_too() -> None:
    pulses = [Activity(), Activity()]
    pulses[1].enter(COMPUTE)
    with beating(pulses) as (mine, other):
        other.stop()
        told = str(mine.explain(lost()))
    assert "rank 1 on" in told


def test_a_rank_that_is_stuck_after_another_one_failed_ends_itself(
    ended: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "_SECONDS_TO_END", 0.2)
    pulses = [Activity(), Activity()]
    pulses[0].enter(COMPUTE)
    pulses[0].step = 3
    with beating(pulses) as (_, other):
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
    monkeypatch.setattr(heartbeat, "_SECONDS_TO_END", 0.2)
    pulses = [Activity(), Activity()]
    pulses[1].enter(DATA)
    pulses[0].waiting("gradients", phase).__enter__()
    with beating(pulses):
        until(lambda: bool(ended))
    assert ended[0] == 7
    said_by_it = capfd.readouterr().err
    assert "samestep: rank 0: a collective waited longer than distributed.timeout" in said_by_it
    assert re.search(r"rank 1 on .* is in data loading at step 0", said_by_it)


def test_a_rank_without_a_sign_of_life_is_lost_long_before_the_timeout(
    ended: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    pulses = [Activity(), Activity(), Activity()]
    for activity in pulses[1:]:
        activity.enter(COMPUTE)
    with beating(pulses, timeout=60, lost_after=4) as hearts:
        mine, _, other = hearts
        for heart in hearts:
            heart._interval = 0.2
        pulses[0].waiting("gradients").__enter__()
        other.stop()  # its machine is gone, and says nothing; the third rank only takes its time
        until(lambda: bool(ended))
        assert mine._store.read("failed") is not None, "those who wait for it as well learn of it"
    assert ended[0] == PeerLost.exit_code
    said_by_it = capfd.readouterr().err
    assert re.search(r"no sign of life for 4 s: rank 2 on .* in compute", said_by_it)
    assert "rank 1 on" not in said_by_it


def test_ranks_that_are_busy_for_long_are_not_lost(ended: list[int]) -> None:
    pulses = [Activity(), Activity()]
    pulses[1].enter(COMPUTE)
    with beating(pulses, timeout=60, lost_after=4) as hearts:
        for heart in hearts:
            heart._interval = 0.2
        pulses[0].waiting("gradients").__enter__()
        time.sleep(10)
    assert not ended


def test_a_long_step_of_our_own_is_no_hang(ended: list[int]) -> None:
    pulses = [Activity(), Activity()]
    for activity in pulses:
        activity.enter(COMPUTE)
    with beating(pulses, timeout=0.4) as hearts:
        for heart in hearts:
            heart._moved -= 1000
        time.sleep(0.3)
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


# -- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "action"),
    [
        ([0, 0], AgreedAction()),
        ([0, 256], AgreedAction(save=True)),
        ([0, float(signal.SIGTERM)], AgreedAction(signal="SIGTERM", rank=1)),
        ([float(signal.SIGUSR1), float(signal.SIGTERM)], AgreedAction(signal="SIGUSR1", rank=0)),
        ([0, 256.0 + signal.SIGUSR2, 0], AgreedAction(save=True, signal="SIGUSR2", rank=1)),
        ([256.0, float(signal.SIGINT)], AgreedAction(save=True, signal="SIGINT", rank=1)),
    ],
)
def test_the_ranks_flags_become_one_action(flags: list[float], action: AgreedAction) -> None:
    assert AgreedAction.of(flags) == action


@pytest.fixture
def handlers() -> Iterator[dict[signal.Signals, Any]]:
    """The handlers before, which must be there again after."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield before
    after = {number: signal.getsignal(number) for number in STOPPING}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_signal_only_sets_a_flag(number: signal.Signals, handlers: dict[Any, Any]) -> None:
    with StopSignals() as signals:
        assert signals.flag(save=False) == 0
        os.kill(os.getpid(), number)
        assert signals.flag(save=False) == number
        assert signals.flag(save=True) == number + 256
        os.kill(os.getpid(), number)  # again and again
        assert AgreedAction.of([signals.flag(save=False)]).signal == number.name


def test_the_first_interrupt_asks_and_the_second_one_ends(
    handlers: dict[Any, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.flag(save=False) == signal.SIGINT
        assert "press Ctrl-C again to stop at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_of_several_signals_the_first_one_counts(handlers: dict[Any, Any]) -> None:
    """Slurm sends SIGUSR1, which asks for a requeue, and later SIGTERM."""
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.flag(save=False) == signal.SIGUSR1


def test_a_save_alone_is_no_signal(handlers: dict[Any, Any]) -> None:
    with StopSignals() as signals:
        assert AgreedAction.of([signals.flag(save=True)]) == AgreedAction(save=True)


def test_handlers_are_what_they_were_also_after_an_error(handlers: dict[Any, Any]) -> None:
    signals = StopSignals()
    with pytest.raises(KeyError), signals:
        raise KeyError
    assert {number: signal.getsignal(number) for number in STOPPING} == handlers
    with signals:  # and it can be entered again
        assert signal.getsignal(signal.SIGTERM) != handlers[signal.SIGTERM]


def test_a_signal_that_is_ignored_stays_ignored(handlers: dict[Any, Any]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signals.flag(save=False) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, handlers[signal.SIGHUP])


def test_an_ignored_interrupt_stays_ignored(handlers: dict[Any, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for `command &` in a script
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.flag(save=False) == 0
    finally:
        signal.signal(signal.SIGINT, handlers[signal.SIGINT])


def test_somebody_elses_handler_wins(handlers: dict[Any, Any]) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signals.flag(save=False) == 0
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, handlers[signal.SIGUSR1])


def test_outside_the_main_thread_signals_do_what_they_did(handlers: dict[Any, Any]) -> None:
    seen: list[bool] = []

    def elsewhere() -> None:
        with StopSignals() as signals:
            seen.append({n: signal.getsignal(n) for n in STOPPING} == handlers)
            seen.append(signals.flag(save=False) == 0)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [True, True]


# -- the verdict ----------------------------------------------------------------------------------

TRACE = 'Traceback (most recent call last):\n  File "task.py", line 3, in loss\nValueError: boom\n'


def said(
    folder: Path, rank: int, message: str, when: int, trace: str = "", code: int = 1
) -> ProcessFailure:
    """A rank that could leave its exception to the agent."""
    path = folder / f"error-{rank}.json"
    extra = {"py_callstack": trace, "timestamp": str(when)}
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    return ProcessFailure(rank, 500 + rank, code, str(path))


def silent(rank: int, code: int, when: int = 0) -> ProcessFailure:
    """A rank that could say nothing."""
    failure = ProcessFailure(rank, 500 + rank, code, "<N/A>")
    failure.timestamp = when
    return failure


def verdict(folder: Path, *failures: ProcessFailure, ranks: int = 4) -> ExitReport:
    launch = folder / "launch"
    return read_failures({failure.local_rank: failure for failure in failures}, ranks, launch)


def test_the_rank_that_failed_by_itself_comes_first(tmp_path: Path) -> None:
    found = verdict(
        tmp_path,
        said(tmp_path, 0, "PeerLost: rank 0: rank 2 on n1 failed first: ValueError: boom", 100),
        silent(1, -signal.SIGTERM, 100),
        said(tmp_path, 2, "ValueError: boom", 101, TRACE),
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
    found = verdict(
        tmp_path,
        said(tmp_path, 0, "KeyError: 'late'", 300, TRACE),
        said(tmp_path, 3, "ValueError: early", 100, TRACE),
        said(tmp_path, 1, "OSError: later", 200, TRACE),
    )
    order = [
        int(n) for n in re.findall(r"^rank (\d) (?:on .* failed|\(pid)", str(found.error), re.M)
    ]
    assert order == [3, 1, 0]


def test_a_killed_rank_is_the_cause_and_is_lost(tmp_path: Path) -> None:
    found = verdict(
        tmp_path,
        said(tmp_path, 0, "PeerLost: lost another rank: Connection closed", 100),
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
    found = verdict(tmp_path, silent(0, -signal.SIGKILL, 1), silent(3, code, 2))
    assert found.lost == ((0, 3) if lost_too else (0,))


def test_if_all_only_lost_a_peer_the_first_of_them_is_shown(tmp_path: Path) -> None:
    found = verdict(
        tmp_path,
        said(tmp_path, 0, "PeerLost: rank 0 lost a peer", 200),
        said(tmp_path, 1, "PeerLost: rank 1 lost a peer", 100),
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
    found = verdict(tmp_path, said(tmp_path, 1, message, 100, TRACE))
    assert (found.error.exit_code, found.may_pass) == (code, passes)
    assert found.headline == f"rank 1 (pid 501): {message.partition(': ')[2]}"


def test_an_error_of_ours_needs_no_traceback(tmp_path: Path) -> None:
    text = str(verdict(tmp_path, said(tmp_path, 1, "NonFiniteLoss: step 3", 1, TRACE)).error)
    assert text.splitlines()[1] == "step 3"
    assert "Traceback" not in text


def test_a_stop_is_no_failure_and_is_not_tried_again(tmp_path: Path) -> None:
    words = "SIGTERM on rank 1 stopped the run after step 6: it is saved"
    found = verdict(
        tmp_path,
        said(tmp_path, 1, f"Stopped: {words}", 100, code=75),
        said(tmp_path, 0, f"Stopped: {words}", 100, code=75),
    )
    assert isinstance(found.error, Stopped)
    assert (str(found.error), found.error.exit_code) == (words, 75)
    assert not found.may_pass
    assert found.lost == ()


def test_a_rank_that_left_without_a_word_is_told_by_its_exit_code(tmp_path: Path) -> None:
    found = verdict(tmp_path, silent(0, 9), ranks=1)
    assert str(found.error).splitlines()[1] == "ended with exit code 9 and left no traceback"
    assert isinstance(found.error, SamestepError)


def test_a_message_of_one_text_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": "ValueError: boom", "timestamp": 5}))
    found = verdict(tmp_path, ProcessFailure(0, 500, 1, str(path)))
    assert found.headline == "rank 0 (pid 500): boom"


# -- how many to start ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fewest", "most", "shown"),
    [("4", 4, 4, "4"), ("2:4", 2, 4, "2:4"), ("3:3", 3, 3, "3")],
)
def test_a_size_is_a_number_or_a_range(text: str, fewest: int, most: int, shown: str) -> None:
    size = Size.parse(text, "--nproc")
    assert (size.fewest, size.most, str(size)) == (fewest, most, shown)
    assert size.is_range is (fewest != most)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "--nproc is '': give a number, or a range such as 2:4"),
        ("four", "--nproc is 'four': give a number"),
        ("2.5", "give a number, or a range"),
        ("2:", "give a number, or a range"),
        (":4", "give a number, or a range"),
        ("1:2:3", "give a number, or a range"),
        ("2-4", "give a number, or a range"),
        ("0", "--nproc is 0: it must be at least 1"),
        ("0:4", "--nproc is 0:4: it must be at least 1"),
        ("-1", "--nproc is -1: it must be at least 1"),
        ("4:2", "--nproc is 4:2: the first number of a range is the smaller one"),
    ],
)
def test_a_size_that_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(LaunchError) as caught:
        Size.parse(text, "--nproc")
    assert words in str(caught.value)


GOOD = {"task": "task.py:Good", "epochs": 1, "global_batch": 8}


@pytest.mark.parametrize(
    ("overrides", "options", "words"),
    [
        ([], {"nproc": Size(2, 4)}, "no rank can be left out without a restart"),
        ([], {"nproc": Size(2, 4), "max_restarts": 1, "nodes": Size(1, 2)},
         "--nproc is 2:4 beside --nodes 1:2"),
        ([], {"nproc": 2, "nodes": Size(1, 2)}, "nothing says where they meet"),
        ([], {"nproc": 2, "rendezvous": "n1:29500"}, "--rendezvous is for several machines"),
        (["distributed.world_size=4"], {"nproc": Size(2, 4), "max_restarts": 1},
         "world_size is 4 but the number of ranks may change"),
        (["distributed.enabled=false"], {"nproc": 2}, "enabled is false but --nproc is 2"),
        ([], {"nproc": 9}, "lanes"),
        ([], {"nproc": 5, "nodes": Size(1, 2), "rendezvous": "n1:29500"}, "lanes"),
    ],
)  # fmt: skip
def test_a_launch_that_contradicts_itself_is_refused(
    overrides: list[str], options: dict[str, Any], words: str
) -> None:
    config = load_config(GOOD, overrides)
    with pytest.raises(SamestepError) as caught:
        local_launch(RankCommand(config, Path("run.yaml")), **options)
    assert words in str(caught.value)


def test_a_range_of_ranks_starts_the_most_and_knows_the_fewest() -> None:
    config = load_config(GOOD, ())
    launch = local_launch(RankCommand(config, Path("run.yaml")), Size(2, 4), max_restarts=3)
    assert (launch.nproc, launch.min_nproc, launch.max_restarts) == (4, 2, 3)


def test_a_signal_before_the_run_has_begun_is_not_lost() -> None:
    with DeferredSignals():
        os.kill(os.getpid(), signal.SIGUSR1)
        with StopSignals() as signals:
            assert signals.flag(save=False) == signal.SIGUSR1
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signals.flag(save=False) == signal.SIGUSR1, "the first one counts"
        with StopSignals() as again:
            assert again.flag(save=False) == signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
