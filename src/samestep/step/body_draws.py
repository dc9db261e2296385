"""The random numbers of a loop's body: its own, the same on all ranks, and those of each lane."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from samestep.lanes.random_streams import BETWEEN, MODEL, RngStreams

_BODY = 3
"""The place in the stream between lanes that a body begins with."""


class BodyDraws:
    """Puts the generators where the body's next lines draw.

    Of lanes that take turns, torch's draws continue where each was left: they are those of a step that runs the whole
    lane at once, as a CUDA graph does.
    """

    def __init__(self, rng: RngStreams, step: int) -> None:
        self._rng, self._step = rng, step
        self._states: dict[int, list[Tensor]] = {}
        """The states of torch's generators where each lane was left."""
        self._open: int | None = None
        """The lane that draws now."""
        self._calls = self._restarts = 0
        """How often lanes ran whole, and the body's own draws begun anew: the same on all ranks."""

    @property
    def place(self) -> tuple[int, ...]:
        """Return where the body's own draws began that come now."""
        return self._step, _BODY + self._restarts

    def begin(self) -> None:
        """Begin the body: reading has drawn."""
        self._rng.enter(BETWEEN, at=self.place)

    def restart(self) -> None:
        """Lanes have drawn: what the body draws next must not depend on how many there were."""
        self._restarts += 1
        self._rng.enter(BETWEEN, at=self.place)

    @contextmanager
    def per_lane(self) -> Iterator[Callable[[int], None]]:
        """Around an operation that draws once per lane; yields what is called before each."""
        with self._rng.kept(torch_only=True):
            try:
                yield self._enter
            finally:
                self._leave()

    def _enter(self, lane: int) -> None:
        self._leave()
        if lane in self._states:
            self._rng.put_torch_states(self._states[lane])
        else:
            self._rng.enter(MODEL, max(lane, 0), at=(self._step,), torch_only=True)
        self._open = lane

    def _leave(self) -> None:
        if self._open is not None:
            self._states[self._open] = self._rng.torch_states()
            self._open = None

    @contextmanager
    def whole_lanes(self) -> Iterator[Callable[[int], None]]:
        """Around code that runs once per lane, and may draw by any generator."""
        self._calls += 1
        call = self._calls

        def enter(lane: int) -> None:
            self._rng.enter_host(MODEL, max(lane, 0), at=(self._step, call))
            self._enter(lane)

        try:
            yield enter
        finally:
            self._leave()
            self.restart()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Around what runs later than the body called it: the body's own draws are kept."""
        restarts = self._restarts
        try:
            with self._rng.kept():
                yield
        finally:
            self._restarts = restarts

    def again(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what makes the lines that follow now draw a second time what they draw first."""
        states, calls = dict(self._states), self._calls

        @contextmanager
        def second() -> Iterator[None]:
            after, made = self._states, self._calls
            self._states, self._calls = dict(states), calls
            try:
                with self.apart():
                    yield
            finally:
                self._states, self._calls = after, made

        return second
