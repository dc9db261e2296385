"""Signals that come before a run has begun."""

from __future__ import annotations

import os
import signal

from samestep.distributed.signals import DeferredSignals, StopSignals


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


def test_of_several_signals_the_first_one_is_remembered() -> None:
    with DeferredSignals() as deferred:
        assert deferred.received == 0
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert deferred.received == signal.SIGUSR2


def test_signals_that_end_a_process_by_hand_are_left_alone() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with DeferredSignals():
        assert {number: signal.getsignal(number) for number in before} == before


def test_somebody_elses_handler_is_left_alone() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with DeferredSignals() as deferred:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        assert deferred.received == 0
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
