"""A store that may take its time to answer, but not forever: its machine may be silent."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from samestep.environment.secret import Signer
from samestep.errors import NotAuthentic
from samestep.parsing.limits import visible

T = TypeVar("T")


def _nobody(place: str) -> None:
    """Report nothing of what strangers write."""


class TimeoutStore:
    """Answers of the rendezvous store, or None once it is gone.

    The calls are made on a separate thread: torch's store waits forever for an answer where the
    other side neither answers nor closes the connection. Everybody who reaches the store can write
    to it, other users of the machine too: texts without this launch's signature are as if not there.

    Args:
        store: torch's.
        seconds: How long it gets to answer.
        signer: Of this launch; None where it has no secret, and all are believed.
        foreign: Called with the place of what somebody else wrote, once for each.
    """

    def __init__(
        self, store: Any, seconds: float, signer: Signer | None = None, foreign: Callable[[str], None] = _nobody
    ) -> None:
        self._store, self._seconds = store, seconds
        self._signer, self._foreign = signer, foreign
        self._reported: set[str] = set()
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
        signed = self._signed(key, text)
        self._call(lambda: self._store.set(key, signed))

    def add(self, key: str, number: int) -> int | None:
        return self._call(lambda: int(self._store.add(key, number)))

    def set_first(self, key: str, text: str) -> None:
        """Set a key that was not set before, by anybody with the secret."""
        signed = self._signed(key, text)
        self._call(lambda: self._store.compare_set(key, "", signed))
        if self._signer is not None and not self.has(key):
            self._call(lambda: self._store.set(key, signed))

    def has(self, key: str) -> bool:
        """Return whether a rank of this launch has set it."""
        return self._text(key) is not None

    def read(self, key: str) -> dict[str, Any] | None:
        """Return a document that was set; None if it was not."""
        text = self._text(key)
        return json.loads(text, object_hook=_visible) if text else None

    def _signed(self, key: str, text: str) -> str:
        return text if self._signer is None else self._signer.sign_text(key, text)

    def _text(self, key: str) -> str | None:
        if not self._call(lambda: self._store.check([key])):
            return None
        found = self._call(lambda: self._store.get(key))
        if found is None:
            return None
        text = found.decode(errors="surrogateescape") if isinstance(found, bytes) else str(found)
        if self._signer is None:
            return text
        try:
            return self._signer.verified_text(key, text)
        except NotAuthentic:
            if key not in self._reported:
                self._reported.add(key)
                self._foreign(key)
            return None


def _visible(document: dict[str, Any]) -> dict[str, Any]:
    """Texts of other ranks go to this one's terminal."""
    return {k: visible(value) if isinstance(value, str) else value for k, value in document.items()}
