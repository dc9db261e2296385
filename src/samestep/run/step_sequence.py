"""The steps of a run, handed to loops: all of them in a row, or epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

from samestep.errors import StepError
from samestep.step.step import Step

_ALL_EPOCHS = (
    "run.steps was called again, and would train once more: it gives the steps of all epochs. For a loop "
    "over epochs write: for epoch in run.epochs(): for step in run.steps(...)"
)


class StepSequence:
    """Gives every step once."""

    def __init__(self) -> None:
        self._steps: Iterator[Step] | None = None
        self._data: Any = None
        self._next: Step | None = None
        """The step that comes next, or that is not ended yet; by epochs only."""
        self.epoch: int | None = None
        """The epoch that a loop over epochs is in; None before it."""
        self._taken = False
        self._given_back: Step | None = None

    def epochs(self, first: int, last: int | None) -> Iterator[int]:
        """Yield the numbers of the epochs; each loop body takes its steps from `of`.

        Args:
            first: The epoch that the run is in.
            last: The epoch after the last one; None to continue until the steps end.
        """
        if (self._steps is not None and self._given_back is None) or self.epoch is not None:
            raise StepError("run.epochs was called when the run had begun: call it once")
        self.epoch = first
        self._next, self._given_back = self._given_back, None
        while last is None or self.epoch < last:
            self._taken = False
            yield self.epoch
            if not self._taken:
                raise StepError(
                    f"nothing was trained in epoch {self.epoch}: take its steps inside the loop, with "
                    "for step in run.steps(...)"
                )
            if self._next is not None and not _is_end(self._next):
                raise StepError(
                    f"epoch {self.epoch} was left after step {self._next.epoch_step}: an epoch is one pass "
                    "over the data. Set steps for a shorter run"
                )
            self._advance()
            if self._next is None:
                return
            self.epoch += 1

    def of(self, data: Any, begin: Callable[[], Iterator[Step]]) -> Iterator[Step]:
        """Yield the steps of this epoch, or of all of them if nobody asked for epochs."""
        if self.epoch is None:
            again, self._given_back = self._given_back, None
            if self._steps is not None and again is None:
                raise StepError(_ALL_EPOCHS)
            if self._steps is None:
                self._steps, self._data = begin(), data
            if again is not None:
                yield again
            # Not `yield from`, which would end them with a loop that is left: see `finish`.
            for step in self._steps:
                yield step
            return
        if self._taken:
            raise StepError(f"run.steps was called twice in epoch {self.epoch}: call it once")
        self._taken = True
        if self._steps is None:
            self._steps, self._data = begin(), data
            self._advance()
        elif data is not self._data:
            raise StepError("run.steps got other data than in the epoch before: a run has one dataset")
        while self._next is not None:
            step = self._next
            yield step
            if _is_end(step):
                return  # what ends the step follows the loop body's last lines
            self._advance()

    def give_back(self, step: Step, is_first: bool) -> None:
        """A loop has taken a step and left without training it: the next loop begins with it.

        Args:
            step: Which it has taken.
            is_first: Whether it has trained none before.
        """
        if self.epoch is None:
            self._given_back = step
        elif is_first:
            self._taken = False

    def finish(self) -> None:
        """End the step that a loop was left in; the run must have been told that it is the last."""
        if self._steps is not None:
            next(self._steps, None)

    def close(self) -> None:
        """Leave what a step has entered, signal handlers for example. Safe to call twice."""
        if isinstance(self._steps, Generator):
            self._steps.close()

    def _advance(self) -> None:
        assert self._steps is not None, "opened with the first epoch"
        self._next = next(self._steps, None)


def _is_end(step: Step) -> bool:
    """Return whether an epoch has no step after this one: its last, or the run's, which may come before."""
    return step.ends_epoch or step.ends_run
