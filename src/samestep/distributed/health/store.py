"""A store that may take its time to answer, but not forever: its machine may be silent."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class PatientStore:
    """Answers of the rendezvous store, or None once it is gone.

    The calls are made on a separate thread: torch's store waits forever for an answer where the
    other side neither answers nor closes the connection.
    """

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self.is_gone = False
        """Whether it was closed, or has not answered in time."""
        self.is_silent = False
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="samestep-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; if it is stuck, it ends with the process. Safe to call twice."""
        self.is_gone = True
        self._calls.put(None)
        self._thread.join(0.5)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _call(self, call: Callable[[], T]) -> T | None:
        if self.is_gone:
            return None
        answers: list[T] = []
        done = threading.Event()

        def run() -> None:
            try:
                answers.append(call())
            except RuntimeError:
                self.is_gone = True
            finally:
                done.set()

        self._calls.put(run)
        if not done.wait(self._seconds):
            self.is_gone = self.is_silent = True
        return answers[0] if answers else None

    def set(self, key: str, text: str) -> None:
        self._call(lambda: self._store.set(key, text))

    def add(self, key: str, number: int) -> int | None:
        return self._call(lambda: int(self._store.add(key, number)))

    def set_first(self, key: str, text: str) -> None:
        """Set a key that was not set before."""
        self._call(lambda: self._store.compare_set(key, "", text))

    def has(self, key: str) -> bool:
        return bool(self._call(lambda: self._store.check([key])))

    def read(self, key: str) -> dict[str, Any] | None:
        """A document that was set; None if it was not."""
        if not self.has(key):
            return None
        text = self._call(lambda: self._store.get(key))
        return json.loads(text) if text else None
