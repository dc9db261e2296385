"""Signals that stop a run: a handler only sets a flag, which travels with the next step.

Nothing is saved or sent inside a handler. All ranks learn of the flag with the step's own
reduction and act at the same step boundary, so one rank's signal is enough. Signals before a run has begun are
kept until it can act on them; those of a command are forwarded to its ranks. No torch here.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from samestep.errors import Stopped

TIME_LIMIT = "preemption.after_minutes"
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_TIME_LIMIT = 255
"""In place of a signal's number: none is as high."""
_SAVE = 256
"""Added to the flag of a rank that requests a checkpoint; below it is the number of a signal."""


@dataclass(frozen=True)
class AgreedAction:
    """The action of all ranks at the end of a step, since at least one of them requested it."""

    save: bool = False
    signal: str | None = None
    """The signal that stops the run, or the key of the config that does."""
    rank: int = 0
    """The lowest rank that got one."""

    @classmethod
    def of(cls, flags: Sequence[float]) -> AgreedAction:
        """Read the flag of every rank."""
        if not any(flags):
            return NO_ACTION
        signals = [int(flag) % _SAVE for flag in flags]
        rank = next((rank for rank, number in enumerate(signals) if number), None)
        save = any(flag >= _SAVE for flag in flags)
        if rank is None:
            return cls(save)
        number = signals[rank]
        name = TIME_LIMIT if number == _TIME_LIMIT else signal.Signals(number).name
        return cls(save, name, rank)


NO_ACTION = AgreedAction()


class StopSignals:
    """While entered, a stop signal is recorded instead of ending the process."""

    def __init__(self) -> None:
        self._received = 0
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        # Python lets only the main thread install handlers; elsewhere signals keep theirs.
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                handler = signal.getsignal(number)
                early = getattr(handler, "__self__", None)
                if isinstance(early, DeferredSignals):
                    self._received = self._received or early.received
                elif handler not in (signal.SIG_DFL, signal.default_int_handler):
                    continue  # the user's own, or ignored on purpose: that wins
                self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            os.write(2, b"\nStopping after this step; press Ctrl-C again to stop at once.\n")
        # The first one counts: Slurm's SIGUSR1, which requests a requeue, may be followed by
        # its SIGTERM before the step ends.
        self._received = self._received or number

    @property
    def is_stopping(self) -> bool:
        """Return whether a stop signal has come."""
        return self._received != 0

    def flag(self, save: bool, time_is_up: bool = False) -> float:
        """This rank's flag for the coming step."""
        stops = self._received or (_TIME_LIMIT if time_is_up else 0)
        return float(stops + (_SAVE if save else 0))


@contextmanager
def stopping_at_once(work: str, report: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """While entered, a stop signal raises `Stopped`: for work that has nothing to save, but to clean up.

    Python drops what is raised while a finalizer runs, so what is yielded raises it again: long work
    calls it now and then.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        check()

    def check() -> None:
        if received:
            name = signal.Signals(received[0]).name
            raise Stopped(f"{name} stopped {work}: nothing is kept")

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {n: signal.signal(n, stop) for n in STOPPING}
    try:
        yield check
    except Stopped as stopped:
        report(str(stopped))
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def outlive_stop_signals(worker: int) -> None:
    """Ignore stop signals in loader processes: the rank needs them until it has saved.

    Launchers and Ctrl-C signal whole groups of processes. Only the rank itself ends its workers.
    """
    import multiprocessing  # here: a signal may come while a rank's imports take their time

    del worker
    rank = multiprocessing.parent_process()
    end_with_parent(signal.SIGKILL, None if rank is None else rank.pid)
    for number in STOPPING:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):
        # macOS does not tell who sent a SIGTERM. In its own process group a worker gets only
        # those that are meant for it; batch systems, which signal all groups, do not run there.
        os.setpgid(0, 0)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    # Where it shares tensors: `_exit` leaves out the finalizer that removes it. A forked process has
    # its parent's folder at first, which is not its own to remove.
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    inherited = settings.get("tempdir")

    def end_with_the_rank() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            continue
        folder = settings.get("tempdir")
        if folder not in (None, inherited):
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=end_with_the_rank, name="samestep-worker", daemon=True).start()


def stop_with_input() -> None:
    """Get SIGTERM when standard input ends: the launcher on another machine is gone."""

    def wait() -> None:
        while os.read(0, 4096):
            continue
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="samestep-input", daemon=True).start()


_PR_SET_PDEATHSIG = 1
_SECONDS_BETWEEN_LOOKS = 1.0


def end_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Get a signal when the process ends that started this one, however it ends.

    On Linux from the kernel, even if this process is stuck; elsewhere from a thread that looks.

    Args:
        number: SIGTERM lets a rank save first.
        parent: The process that started this one, if that is known: it may have ended already.
    """
    if sys.platform == "linux":
        import ctypes  # here, as above

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
        if parent not in (None, os.getppid()):  # it ended before the call
            os.kill(os.getpid(), number)
        return
    parent = parent or os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        os.kill(os.getpid(), number)

    threading.Thread(target=look, name="samestep-parent", daemon=True).start()


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
            self._before = {number: signal.signal(number, self._forward) for number in STOPPING}
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
