"""Signals that come before a run has begun."""

from __future__ import annotations

import os
import signal

from samestep.distributed.deferred_signals import DeferredSignals
from samestep.distributed.signals import StopSignals


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
