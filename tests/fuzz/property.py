"""What must hold for any input: it works or it is one kind of error, and soon."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("FUZZ_TIMES", "1"))
"""`make fuzz` tries this many times as many cases, and other ones each time."""
SECONDS = 20.0
"""For one case. They take milliseconds; without limits, some would take hours."""


def cases(count: int) -> settings:
    """So many cases, the same in every run of the suite."""
    return settings(
        max_examples=count * TIMES,
        derandomize=TIMES == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def check_message(error: Exception) -> None:
    """An error must be a message for a person, on any terminal."""
    assert 0 < len(str(error)) < 20_000


@contextmanager
def soon() -> Iterator[None]:
    """Fail what does not end."""

    def end(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"not done after {SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
