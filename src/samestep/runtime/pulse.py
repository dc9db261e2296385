"""What this process is doing right now, kept cheaply enough to be kept in every step.

The main thread writes it; the heartbeat's thread reads it for the other ranks. The time
spent in each phase adds up, which is where a run's time split comes from.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter

from samestep.runtime.peers import lost_peer

STARTING = "starting"
DATA = "data loading"
COMPUTE = "compute"
EXCHANGE = "exchange"
SAVE = "saving"
EVALUATE = "evaluation"
READING = "reading losses"
BETWEEN_STEPS = "between steps"

BUSY = (DATA, COMPUTE)
"""The phases in which a rank does work of its own, that others may have to wait for."""

_REMEMBERED = 64


class Pulse:
    """This process's step, phase and last collective, and the seconds spent in each phase."""

    __slots__ = ("_waits", "phase", "recent", "seconds", "sequence", "since", "step")

    def __init__(self) -> None:
        self.step = 0
        self.phase = STARTING
        self.since = perf_counter()
        self.sequence = 0
        """Collectives called so far; the same number is the same call on every rank."""
        self.recent: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        """The last ones with their numbers."""
        self.seconds: dict[str, float] = dict.fromkeys(
            (STARTING, DATA, COMPUTE, EXCHANGE, SAVE, EVALUATE, READING, BETWEEN_STEPS), 0.0
        )
        self._waits: dict[str, _Waiting] = {}

    def enter(self, phase: str) -> str:
        """Go on in another phase; returns the one before."""
        now, before = perf_counter(), self.phase
        self.seconds[before] += now - self.since
        self.phase, self.since = phase, now
        return before

    def during(self, phase: str) -> _During:
        """A block spent in one phase; afterwards the phase is what it was."""
        return _During(self, phase)

    def waiting(self, collective: str, phase: str = EXCHANGE) -> _Waiting:
        """A block that waits for other ranks; a broken connection in it becomes `PeerLost`.

        Not to be nested in a block of the same name.
        """
        known = self._waits.get(collective)
        if known is None:
            known = self._waits[collective] = _Waiting(self, collective, phase)
        return known

    @property
    def collective(self) -> str:
        """The last collective that was called."""
        return self.recent[-1][1] if self.recent else ""

    @property
    def busy(self) -> float:
        """Seconds of work of this rank's own, so far."""
        return sum(self.seconds[phase] for phase in BUSY)


class _During:
    __slots__ = ("_before", "_phase", "_pulse")

    def __init__(self, pulse: Pulse, phase: str) -> None:
        self._pulse, self._phase, self._before = pulse, phase, phase

    def __enter__(self) -> None:
        self._before = self._pulse.enter(self._phase)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # What failed stays where it failed, so that a report can tell.
        if error is None:
            self._pulse.enter(self._before)


class _Waiting(_During):
    __slots__ = ("_collective",)

    def __init__(self, pulse: Pulse, collective: str, phase: str) -> None:
        super().__init__(pulse, phase)
        self._collective = collective

    def __enter__(self) -> None:
        pulse = self._pulse
        pulse.sequence += 1
        pulse.recent.append((pulse.sequence, self._collective))
        self._before = pulse.enter(self._phase)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._pulse.enter(self._before)
            return
        lost = lost_peer(error)
        if lost is not None:
            raise lost from error
