"""A loop that cannot be suspended takes turns with others, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack


class Left(BaseException):
    """Raised inside a loop to end it when the comparison is finished."""


class InThread:
    """Advance a loop that cannot be suspended: it runs in a thread, which waits between turns."""

    def __init__(self, train: Callable[[Callable[[], None]], None], stack: ExitStack) -> None:
        self._train = train
        self._left = 0
        self._error: BaseException | None = None
        self._closing = False
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        stack.callback(self._close)

    def __call__(self, number: int) -> None:
        """Run so many steps."""
        self._left = number
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def end_step(self) -> None:
        """To be called by the loop after every step."""
        self._left -= 1
        if self._left == 0:
            self._done.release()
            self._wait()

    def _wait(self) -> None:
        self._go.acquire()
        if self._closing:
            raise Left

    def _run(self) -> None:
        try:
            self._wait()
            self._train(self.end_step)
            self._error = RuntimeError("the loop ended before the measurement did")
        except Left:
            return
        except BaseException as error:
            self._error = error
        self._done.release()

    def _close(self) -> None:
        self._closing = True
        self._go.release()
        self._thread.join()
