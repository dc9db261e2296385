"""Stop signals: of a rank, and of its loader processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from samestep.distributed.signals import (
    STOPPING,
    TIME_LIMIT,
    AgreedAction,
    SignalForwarder,
    StopSignals,
    stopping_at_once,
)
from samestep.errors import Stopped


@pytest.mark.parametrize(
    ("flags", "action"),
    [
        ([0, 0], AgreedAction()),
        ([0, 256], AgreedAction(save=True)),
        ([0, float(signal.SIGTERM)], AgreedAction(signal="SIGTERM", rank=1)),
        ([float(signal.SIGUSR1), float(signal.SIGTERM)], AgreedAction(signal="SIGUSR1", rank=0)),
        ([0, 256.0 + signal.SIGUSR2, 0], AgreedAction(save=True, signal="SIGUSR2", rank=1)),
        ([255.0, 0], AgreedAction(signal="preemption.after_minutes", rank=0)),
        ([511.0, 0], AgreedAction(save=True, signal="preemption.after_minutes", rank=0)),
        ([256.0, float(signal.SIGINT)], AgreedAction(save=True, signal="SIGINT", rank=1)),
    ],
)
def test_the_ranks_flags_become_one_action(flags: list[float], action: AgreedAction) -> None:
    assert AgreedAction.of(flags) == action


def test_a_signal_counts_before_the_time_limit() -> None:
    signals = StopSignals()
    assert AgreedAction.of([signals.flag(save=False, time_is_up=True)]).signal == TIME_LIMIT
    signals._received = int(signal.SIGUSR1)  # which requests a requeue
    assert AgreedAction.of([signals.flag(save=False, time_is_up=True)]).signal == "SIGUSR1"


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
    """Slurm sends SIGUSR1, which requests a requeue, and later SIGTERM."""
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.flag(save=False) == signal.SIGUSR1


def test_a_save_alone_is_no_signal(handlers: dict[Any, Any]) -> None:
    with StopSignals() as signals:
        assert AgreedAction.of([signals.flag(save=True)]) == AgreedAction(save=True)


def forwarding() -> SignalForwarder:
    return SignalForwarder(lambda number: None, lambda: None)


@pytest.mark.parametrize("handling", [StopSignals, forwarding])
def test_handlers_are_what_they_were_also_after_an_error(handling: Any, handlers: dict[Any, Any]) -> None:
    signals = handling()
    with pytest.raises(KeyError), signals:
        raise KeyError
    assert {number: signal.getsignal(number) for number in STOPPING} == handlers
    with signals:  # and it can be entered again
        assert signal.getsignal(signal.SIGTERM) != handlers[signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])  # by nohup; by a shell, for `command &` in a script
def test_a_signal_that_is_ignored_stays_ignored(number: signal.Signals, handlers: dict[Any, Any]) -> None:
    signal.signal(number, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) == signal.SIG_IGN
            assert signals.flag(save=False) == 0
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, handlers[number])


def test_the_users_own_handler_wins(handlers: dict[Any, Any]) -> None:
    received: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signals.flag(save=False) == 0
        assert received == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, handlers[signal.SIGUSR1])


@pytest.mark.parametrize("handling", [StopSignals, forwarding, lambda: stopping_at_once("the search", print)])
def test_outside_the_main_thread_signals_do_what_they_did(handling: Any, handlers: dict[Any, Any]) -> None:
    seen: list[bool] = []

    def elsewhere() -> None:
        with handling():
            seen.append({n: signal.getsignal(n) for n in STOPPING} == handlers)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [True]


# Loader processes, on systems that know a signal's sender and on macOS, which does not

WORKER = """
import signal, sys, time
if sys.argv[1] == "macos":
    del signal.sigwaitinfo, signal.sigtimedwait
from samestep.distributed.signals import outlive_stop_signals
outlive_stop_signals(0)
print("ready", flush=True)
for line in sys.stdin:
    print("alive", flush=True)
time.sleep(60)
"""


@contextmanager
def worker(system: str) -> Iterator[subprocess.Popen[str]]:
    """A loader process; this one is its rank."""
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, system],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=False,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def is_alive(process: subprocess.Popen[str]) -> bool:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("are you?\n")
    process.stdin.flush()
    return process.stdout.readline() == "alive\n"


@pytest.mark.parametrize("system", ["linux", "macos"])
def test_a_worker_outlives_the_signals_that_stop_its_rank(system: str) -> None:
    with worker(system) as process:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(number)
            assert is_alive(process)


@pytest.mark.parametrize("system", ["linux", "macos"])
def test_a_worker_ends_when_its_rank_ends_it(system: str) -> None:
    with worker(system) as process:
        process.terminate()
        assert process.wait(30) in (0, -signal.SIGTERM)


def test_a_worker_outlives_a_sigterm_of_another_process() -> None:
    with worker("linux") as process:
        subprocess.run(["sh", "-c", f"kill -TERM {process.pid}"], check=True)
        assert is_alive(process)


def test_without_the_sender_of_a_signal_a_worker_leaves_the_group_that_is_signalled() -> None:
    with worker("macos") as process:
        assert os.getpgid(process.pid) == process.pid
    with worker("linux") as process:
        assert os.getpgid(process.pid) == os.getpgid(0)


@pytest.mark.parametrize("number", STOPPING)
def test_work_without_anything_to_save_stops_at_once(number: signal.Signals) -> None:
    before, lines = signal.getsignal(number), list[str]()
    with pytest.raises(Stopped), stopping_at_once("the search", lines.append):
        signal.raise_signal(number)
    assert lines == [f"{number.name} stopped the search: nothing is kept"]
    assert signal.getsignal(number) is before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_arrives_in_a_finalizer_stops_it_too() -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)  # Python drops what is raised here

    def search() -> None:
        with stopping_at_once("the search", lines.append) as check:
            Finalized()
            check()

    lines = list[str]()
    with pytest.raises(Stopped):
        search()
    assert lines == ["SIGTERM stopped the search: nothing is kept"]
