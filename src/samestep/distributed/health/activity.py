"""The current activity of this process, recorded cheaply enough for every step.

The main thread writes it; the heartbeat's thread reads it for the other ranks, and sees by
itself how long nothing moves. The time spent in each phase adds up in some steps only: on
some machines reading the clock costs microseconds, and a step changes its phase often.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter

from samestep.distributed.health.peer_errors import lost_peer

STARTING = "starting"
DATA = "data loading"
COMPUTE = "compute"
EXCHANGE = "exchange"
UPDATE = "update"
SAVE = "saving"
EVALUATE = "evaluation"
READING = "reading losses"
BETWEEN_STEPS = "between steps"

BUSY = (DATA, COMPUTE, UPDATE)
"""The phases in which a rank does its own work, which others may have to wait for."""

_REMEMBERED = 64


class Activity:
    """This process's step, phase and last collective, and the seconds spent in each phase."""

    __slots__ = (
        "_since", "_waits", "before_clock", "moves", "phase", "recent", "seconds", "sequence", "step", "timed",
        "timed_every", "timed_steps",
    )  # fmt: skip

    def __init__(self) -> None:
        self.step = 0
        self.phase = STARTING
        self.moves = 0
        """Changes of phase so far, and what came further in one: while this stays the same, nothing moves."""
        self.timed_every = 8
        """One of this many steps is timed; the same ones on every rank."""
        self.timed = False
        self.timed_steps = 0
        self._since = 0.0
        self.before_clock: Callable[[], None] | None = None
        """Called before the clock is read in a timed step; a measurement lets it wait for the device."""
        self.sequence = 0
        """Collectives called so far; the same number is the same call on every rank."""
        self.recent: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        """The last ones with their numbers."""
        self.seconds: dict[str, float] = dict.fromkeys(
            (STARTING, DATA, COMPUTE, EXCHANGE, UPDATE, SAVE, EVALUATE, READING, BETWEEN_STEPS), 0.0
        )
        self._waits: dict[str, _Waiting] = {}

    def begin_step(self, step: int) -> None:
        """A new step, which is timed or not."""
        self.enter(COMPUTE)
        self.step = step
        self.timed = step % self.timed_every == 0
        if self.timed:
            self.timed_steps += 1
            self._since = perf_counter()

    def end_step(self) -> None:
        """Record that what comes now, until the next step, is part of no step."""
        self.enter(BETWEEN_STEPS)
        self.timed = False

    def enter(self, phase: str) -> str:
        """Change to another phase; returns the one before."""
        before = self.phase
        if self.timed:
            if self.before_clock is not None:
                self.before_clock()
            now = perf_counter()
            self.seconds[before] += now - self._since
            self._since = now
        self.phase = phase
        self.moves += 1
        return before

    def moved(self) -> None:
        """Still in this phase, and further than before."""
        self.moves += 1

    def during(self, phase: str) -> _During:
        """Return a block spent in one phase, timed in any step; afterwards the phase is what it was."""
        return _During(self, phase)

    def waiting(self, collective: str, phase: str = EXCHANGE) -> _Waiting:
        """Return a block that waits for other ranks; a broken connection in it becomes `PeerLost`.

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
        """Seconds of this rank's own work, in the steps that were timed."""
        return sum(self.seconds[phase] for phase in BUSY)


class _During:
    __slots__ = ("_activity", "_before", "_phase", "_started")

    def __init__(self, activity: Activity, phase: str) -> None:
        self._activity, self._phase, self._before = activity, phase, phase
        self._started: float | None = None

    def __enter__(self) -> None:
        self._started = None if self._activity.timed else perf_counter()
        self._before = self._activity.enter(self._phase)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._started is not None:
            self._activity.seconds[self._phase] += perf_counter() - self._started
        # What failed keeps its phase, so that a report can name it.
        if error is None:
            self._activity.enter(self._before)


class _Waiting:
    __slots__ = ("_activity", "_before", "_collective", "_phase")

    def __init__(self, activity: Activity, collective: str, phase: str) -> None:
        self._activity, self._phase, self._before = activity, phase, phase
        self._collective = collective

    def __enter__(self) -> None:
        activity = self._activity
        activity.sequence += 1
        activity.recent.append((activity.sequence, self._collective))
        self._before = activity.enter(self._phase)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._activity.enter(self._before)
            return
        lost = lost_peer(error)
        if lost is not None:
            raise lost from error
