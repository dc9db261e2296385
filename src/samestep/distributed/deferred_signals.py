"""Signals that arrive before a run has begun: kept until it can act on them. No torch here."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DeferredSignals:
    """While entered, SIGUSR1 and SIGUSR2 do not kill a process that is still importing.

    Slurm may announce the end of a short job at once. A rank that dies of it takes the job with
    it; one that keeps it saves after its first step and has the job requeued.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
