"""A thread that ends a process which is alone and hangs: several ranks notice that by themselves.

For runs that nobody looks at: a person who debugs a run may stop it anywhere for as long as they like.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from samestep.distributed.health.activity import STARTING, Activity
from samestep.errors import RankHung

_STDERR = 2


class Reminder:
    """While entered, reports that a block takes long, with the stack, and again after twice as long.

    For what may take as long as it likes, and of which nobody else would notice that it hangs.
    """

    def __init__(self, what: str, seconds: float, report: Callable[[str], None]) -> None:
        self._what, self._seconds, self._report = what, seconds, report
        self._main = threading.current_thread().ident
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="samestep-reminder", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        began, pause = time.monotonic(), self._seconds
        while not self._done.wait(pause):
            pause *= 2
            frame = sys._current_frames().get(self._main or 0)
            stack = "".join(traceback.format_stack(frame))
            taken = time.monotonic() - began
            self._report(f"{self._what} has taken {taken:.0f} s so far. Most recent call last:\n{stack}")


class Watchdog:
    """While entered, this process ends if nothing moves in it for long: no step, batch or save.

    Args:
        activity: What this process does.
        seconds: How long it may stay where it is.
        start_seconds: How long what comes before the first step may take, such as a download, in which
            nothing is seen to move; None for as long as it likes.
    """

    def __init__(self, activity: Activity, seconds: float, start_seconds: float | None = None) -> None:
        self._activity, self._seconds = activity, seconds
        self._start_seconds = start_seconds
        self._interval = min(1.0, seconds / 8)
        self._main = threading.current_thread().ident
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="samestep-watchdog", daemon=True)

    def __enter__(self) -> None:
        self._arm()
        self._thread.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._done.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        seen, moved = self._place(), time.monotonic()
        looked = moved
        while not self._done.wait(self._interval):
            self._arm()
            now, before = time.monotonic(), looked
            looked = now
            suspended = now - before > self._seconds / 2
            place = self._place()
            limit = self._start_seconds if place[1] else self._seconds
            if suspended or place != seen:
                seen, moved = place, now
            elif limit is not None and now - moved > limit:
                self._end(now - moved)

    def _place(self) -> tuple[int, bool]:
        """Return what changes when something moves, and whether it only starts."""
        return self._activity.moves, self._activity.phase == STARTING

    def _arm(self) -> None:
        """End the process unless this is called again in time: the thread cannot look while another one holds
        the interpreter."""
        faulthandler.dump_traceback_later(2 * self._seconds, exit=True, file=_STDERR)

    def _end(self, still: float) -> None:
        activity = self._activity
        where = f"it is in {activity.phase} at step {activity.step} for {still:.0f} s"
        if activity.phase == STARTING:
            where = f"it has not come to its first step for {still:.0f} s"
        frames = sys._current_frames()
        stack = traceback.format_stack(frames[self._main]) if self._main in frames else []
        reason = f"samestep: the run hangs: {where}. Its Python stack is in its output"
        os.write(_STDERR, "".join(["Most recent call last:\n", *stack, reason, "\n"]).encode())
        os._exit(RankHung.exit_code)
