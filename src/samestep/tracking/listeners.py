"""Listeners follow a run while it trains: one protocol, for our own parts and for users."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from samestep.data.batch import LaneBatch
from samestep.lanes.random_streams import HOOKS, RngStreams
from samestep.step.step import Step
from samestep.step.step_log import StepRecord

if TYPE_CHECKING:
    from samestep.evaluation.evaluate import Values


class RunListener:
    """Override what you want to follow, and give it to `run.add_listener`.

    Every method is called on every rank, at the same point of the run; only `on_batch` is
    called for this rank's own batches. What a method draws at random is the same on every rank and
    changes no run. What `after_update` changes, it must change in the same way on every rank.

    Example:
        class Printer(samestep.RunListener):
            def on_record(self, record):
                print(record.step, record.loss)

        run.add_listener(Printer())
    """

    draws = True
    """Whether its methods may draw random numbers; where none does, a step saves the seeding."""
    needs_sample_ids = False
    """Whether `on_batch` reads the ids of iterable data, which cost a digest per sample."""

    reads_gradients = False
    """Whether its methods read `.grad`, which `distributed.shard` leaves with owners alone unless asked."""

    reads_weights = True
    """Whether `after_update` reads weights: with `distributed.shard: weights` they are then gathered for it."""

    def on_batch(self, step: int, batch: LaneBatch) -> None:
        """One of this rank's batches was read, for a step; it is not on the device yet."""

    def after_update(self, step: Step) -> None:
        """The step has changed the weights. Not called for one that was skipped.

        Where a GPU decides whether it is skipped, this comes with the next step's update.
        """

    def on_step(self, step: Step) -> None:
        """A step has been updated; it is saved afterwards, if it is due."""

    def on_record(self, record: StepRecord) -> None:
        """A step's measurements were read from the device, in the order of the steps.

        That is some steps after the step itself: reading each at once would wait for the device.
        """

    def on_times(self, step: int, times: Mapping[str, Any]) -> None:
        """Take what the steps up to this one cost since the last call, as in metrics.jsonl.

        This rank's own times, but for `slowest_rank` and `rank_spread`, which are the same on all.
        """

    def on_evaluation(self, step: int, values: Values) -> None:
        """The model was measured on a validation set."""

    def on_save(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A checkpoint after so many steps was handed to the disk."""

    def on_end(self) -> None:
        """The run has ended by itself, and everything is measured; not after an error or a stop."""


class Listeners(RunListener):
    """All listeners of a run as one; what they draw is the same on every rank."""

    draws = False

    def __init__(self, rng: RngStreams) -> None:
        self._all: list[RunListener] = []
        self._on_batch: list[Callable[[int, LaneBatch], None]] = []
        self._rng = rng
        self._recent: dict[int, Step] = {}
        """The steps whose updates may not have been decided yet."""

    def add(self, listener: RunListener) -> None:
        self._all.append(listener)
        self.draws = self.draws or listener.draws
        # Every lane of every step comes by here: those who do not follow batches are left out.
        if getattr(listener.on_batch, "__func__", None) is not RunListener.on_batch:
            self._on_batch.append(listener.on_batch)

    @property
    def needs_sample_ids(self) -> bool:  # type: ignore[override]
        return any(listener.needs_sample_ids for listener in self._all)

    @property
    def reads_gradients(self) -> bool:  # type: ignore[override]
        return any(listener.reads_gradients for listener in self._all)

    @property
    def reads_weights(self) -> bool:  # type: ignore[override]
        following = [x for x in self._all if type(x).after_update is not RunListener.after_update]
        return any(listener.reads_weights for listener in following)

    def on_batch(self, step: int, batch: LaneBatch) -> None:
        for follow in self._on_batch:
            follow(step, batch)

    def begin_step(self, step: Step) -> None:
        self._recent[step.index] = step
        self._recent.pop(step.index - 2, None)

    def updated(self, index: int) -> None:
        """The step of this number, or the one before it, has changed the weights."""
        self.after_update(self._recent[index])

    def after_update(self, step: Step) -> None:
        if self.draws:
            self._rng.enter(HOOKS, at=(step.index,))
        for listener in self._all:
            listener.after_update(step)

    def on_step(self, step: Step) -> None:
        if self.draws:
            self._rng.enter(HOOKS, at=(step.index, 1))
        for listener in self._all:
            listener.on_step(step)

    def on_record(self, record: StepRecord) -> None:
        for listener in self._all:
            listener.on_record(record)

    def on_times(self, step: int, times: Mapping[str, Any]) -> None:
        for listener in self._all:
            listener.on_times(step, times)

    def on_evaluation(self, step: int, values: Values) -> None:
        for listener in self._all:
            listener.on_evaluation(step, values)

    def on_save(self, step: int, metrics: Mapping[str, Any]) -> None:
        for listener in self._all:
            listener.on_save(step, metrics)

    def on_end(self) -> None:
        for listener in self._all:
            listener.on_end()
