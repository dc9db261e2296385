"""Signals that this command gets while its ranks run elsewhere, forwarded to them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class SignalForwarder:
    """While entered, a stop signal is forwarded to the ranks; a second Ctrl-C ends them at once."""

    def __init__(self, stop: Callable[[signal.Signals], None], end: Callable[[], None]) -> None:
        self._stop, self._end = stop, end
        self._interrupts = 0
        self.received: signal.Signals | None = None
        """The first one that came."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalForwarder:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._forward) for number in _STOPPING}
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        first = self.received is None
        self.received = self.received or signal.Signals(number)
        if self._interrupts > 1:
            self._end()
        elif first:
            self._stop(signal.Signals(number))
