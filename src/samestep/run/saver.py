"""Decides when a run is saved, and what goes into its checkpoints. All ranks decide the same."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoint.format import read_model, read_training
from samestep.checkpoint.manifest import Best, Manifest
from samestep.checkpoint.parts import WHOLE, Part, Patience
from samestep.checkpoint.resume import ResumePoint
from samestep.checkpoint.snapshot import Snapshot
from samestep.checkpoint.state import RunState, Stateful, changed_settings, settings_of
from samestep.checkpoint.store import CheckpointStore
from samestep.config import Config
from samestep.data.batch import Position
from samestep.distributed.context import RunContext
from samestep.distributed.health.activity import SAVE
from samestep.errors import CheckpointError, PeerLost, StepError, TextError
from samestep.optim.weight_average import WeightAverage
from samestep.parsing.json_text import parse_json
from samestep.parsing.limits import check_text, check_values
from samestep.reduce.owned_states import OwnedStates
from samestep.version import __version__

_FREE_SECONDS, _SHARE = 5.0, 0.05
"""How long saves after epochs may keep a run waiting: so long in any case, and this part of its time."""


class Saver:
    """Saves a run by the rules of `checkpoint:`, and brings back what was saved."""

    def __init__(self, config: Config, context: RunContext, folder: Path, point: ResumePoint | None) -> None:
        self._config, self._rules, self._context = config, config.checkpoint, context
        self._writes = context.is_main
        self.folder = folder / "checkpoints"
        self._activity = context.activity
        self._point = point
        self._store = CheckpointStore(
            self.folder, self._rules.keep_last, keep_best=self._rules.keep_best, patience=Patience(context.is_gone)
        )
        self._snapshot = Snapshot()
        self._kept: dict[str, Stateful] = {}
        loaded = {} if point is None else read_training(point.folder)
        self.position = _position(point, loaded.get("position")) if point is not None else Position()
        """Where the run resumes."""
        resumes = point is not None and not point.branches
        self.rows: list[dict[str, Any]] = _rows(loaded.get("rows", [])) if resumes else []
        """Measurements from before it that the metrics file may lack."""
        self._kept_before: dict[str, Any] = loaded.get("kept", {})
        self._loaded: dict[str, Any] | None = loaded or None
        """Until the run's objects have taken it: it may be as large as they are."""
        self._state: RunState | None = None
        self.owned_states: OwnedStates | None = None
        self._clock = time.monotonic()
        self.requested = False
        """Whether to save at the end of this step."""
        self._timed_out = self._has_skipped = False
        self._began, self._took = time.monotonic(), 0.0
        """When the run was opened, and how long saves have kept it waiting."""
        self._saved_step = 0 if point is None else point.manifest.step
        self.metrics: Mapping[str, Any] = {} if point is None else point.manifest.metrics
        self._measured = None if point is None else point.manifest.measured
        self.best: Best | None = None if point is None else point.manifest.best
        """The best evaluation so far."""
        self.is_resumed = point is not None
        """Whether a checkpoint fills the run's objects."""
        self.ended = None if point is None else point.manifest.ended
        """Why the resumed run had already ended, unless that was its length."""

    # -- what there is to save -------------------------------------------------------------

    def prepare(
        self, modules: Any, optimizers: Any, schedules: Any, owns: Callable[[Tensor], bool] = lambda param: True
    ) -> None:
        """Take the run's objects; puts the checkpoint's state into them if there is one.

        Args:
            owns: Returns whether this rank holds the optimizer state of a parameter.
        """
        self._state = RunState(modules, optimizers, schedules, self._kept)
        if self._point is not None and self._loaded is not None:
            made = settings_of(optimizers)
            try:
                self._state.load(read_model(self._point.folder), self._loaded, owns)
            except CheckpointError as error:
                raise CheckpointError(f"{self._point.shown}: {error}") from error
            self._loaded = None
            changed = changed_settings(optimizers, made)
            if changed:
                self._context.log.main(
                    f"The checkpoint's values stay, whatever the code says now: {'; '.join(changed)}. A run with "
                    'others needs another name: name=NAME (for python SCRIPT: SAMESTEP_ARGS="name=NAME")'
                )

    def keep(self, name: str, item: Stateful) -> None:
        """Take one more object whose state belongs to the run; brings its state back."""
        if not isinstance(item, Stateful):
            raise StepError(
                f"run.register({name!r}) got a {type(item).__name__}: it needs state_dict() and load_state_dict()"
            )
        if name in self._kept:
            raise StepError(f"run.register was called twice for {name!r}: give each a different name")
        self._kept[name] = item
        if self.owned_states is not None and isinstance(item, WeightAverage):
            self.owned_states.keep(item)
        if self._point is not None:
            if name not in self._kept_before:
                known = ", ".join(self._kept_before) or "nothing"
                raise CheckpointError(f"{self._point.shown} has no state of {name!r}; it keeps {known}")
            item.load_state_dict(self._kept_before.pop(name))

    def keep_if_used(self, name: str, item: Stateful) -> None:
        """Take an object that has a state only once it is used; brings its state back if there is one."""
        self._kept[name] = item
        if name in self._kept_before:
            item.load_state_dict(self._kept_before.pop(name))

    def begin(self, accept: Callable[[], None]) -> None:
        """Call this before the first step; `accept` makes the run's directory that of this run.

        Raises:
            CheckpointError: if the run resumes without something that it had kept.
        """
        self._refuse_unclaimed()
        accept()
        if self._point is not None and self._writes:
            self._store.remove_unfinished()
            # Again, in case the run was killed between a checkpoint and its export.
            self._store.repair_export(self._point.manifest)

    def _refuse_unclaimed(self) -> None:
        names = ", ".join(repr(name) for name, state in self._kept_before.items() if state)
        if names and self._point is not None:
            raise CheckpointError(
                f"{self._point.shown} keeps the state of {names}, which this run does not: call "
                "run.register for it before run.steps"
            )

    @property
    def state(self) -> RunState:
        """Everything that belongs to the run."""
        if self._state is None:
            raise StepError("the run has no state yet: call run.prepare first")
        return self._state

    # -- when ------------------------------------------------------------------------------

    def remember(self, step: int, metrics: Mapping[str, Any], best: bool) -> None:
        """Remember an evaluation; a new best is saved at the end of its step."""
        self._measured = step
        self.metrics = {name: _as_json(name, value) for name, value in metrics.items()}
        if best:
            metric = self._config.best.metric
            self.best = Best(step, metric, float(metrics.get(metric, float("nan"))))
            self.requested = True

    def wants_time(self) -> bool:
        """Return whether to request a save: every_minutes have passed on rank 0. Requests once per save."""
        minutes = self._rules.every_minutes
        # Only in steps that are timed: the clock is not cheap everywhere.
        if minutes is None or not self._writes or self._timed_out or not self._activity.timed:
            return False
        # On a GPU the save comes some steps later.
        self._timed_out = time.monotonic() - self._clock > 60 * minutes
        return self._timed_out

    def is_due(self, steps: int, epochs: int, ends_epoch: bool) -> bool:
        """Return whether the run is to be saved after so many steps, and epochs if one has ended. Every rank calls this."""
        rules = self._rules
        by_steps = rules.every_steps and steps % rules.every_steps == 0
        by_epochs = isinstance(rules.every_epochs, int) and ends_epoch and epochs % rules.every_epochs == 0
        if rules.enabled and (self.requested or by_steps or by_epochs):
            return True
        by_cost = rules.enabled and ends_epoch and rules.every_epochs == "auto"
        # Rank 0, which writes, decides for all.
        return bool(by_cost and self._context.broadcast(self._affords()))

    def _affords(self) -> bool:
        """Return whether saves have taken little of the time."""
        took, passed = self._took, time.monotonic() - self._began
        if took <= max(_FREE_SECONDS, _SHARE * passed):
            return True
        if not self._has_skipped:
            self._has_skipped = True
            self._context.log.main(
                f"Saves have taken {took:.0f} s of {passed:.0f} s: from here on not every epoch is saved "
                "(checkpoint.every_epochs: auto), but the last and the best are"
            )
        return False

    # -- saving ----------------------------------------------------------------------------

    def save(self, after: Position, plan: Mapping[str, Any], ended: str | None) -> bool:
        """Save the run after a step; every rank calls this, rank 0 writes, or each rank what it owns.

        Returns:
            Whether there was something to save; the same on every rank.
        """
        self.requested = self._timed_out = False
        self._clock = time.monotonic()
        if not self._rules.enabled or after.step == self._saved_step:
            return False
        self._saved_step = after.step
        began = time.monotonic()
        with self._context.activity.during(SAVE):
            self._store.wait()  # the buffers are the last write's until it is through
            part = self._begin_parts(after.step)
            if self._writes or part.of > 1:
                self._store.write(*self.take(after, plan, ended), part)
                if not self._rules.asynchronous:
                    self._store.wait()
        self._took += time.monotonic() - began
        return True

    def whole_state(self) -> AbstractContextManager[None]:
        """Return what lets rank 0 hold the states of all owners, if there are owners; every rank enters it."""
        return nullcontext() if self.owned_states is None else self.owned_states.whole()

    def _begin_parts(self, step: int) -> Part:
        """Return which part of the checkpoint this rank writes; every rank calls this."""
        part = WHOLE if self.owned_states is None else self.owned_states.part
        if part.of == 1:
            return WHOLE
        if self._writes:
            self._store.begin_parts(step)
        self._context.barrier()
        folder = self._store.partial(step)
        if not folder.is_dir():
            raise CheckpointError(
                f"rank {self._context.rank} does not see {folder}, to which every rank writes its part "
                "(distributed.shard): all machines must see the run directory under one path"
            )
        return part

    def take(
        self, after: Position, plan: Mapping[str, Any], ended: str | None, more: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any], Manifest]:
        """Return a copy of the run after a step, or of this rank's part: the model, the rest, and what they are."""
        if self.owned_states is None:
            model, training = self.state.model_tensors(), self.state.training()
        else:
            model, training = self.owned_states.take_part(self.state)
        if self._writes or self.owned_states is None:  # any rank that survives the others
            training |= {"position": vars(after), **(more or {})}
        copy = self._snapshot.take({"model": model, "training": training})
        return copy["model"], copy["training"], self._manifest(after, plan, ended)

    def wait(self) -> None:
        """Wait until what was saved is on the disk."""
        with self._context.activity.during(SAVE):
            self._store.wait()

    def finish_write(self) -> None:
        """Let the write in flight end, whatever comes of it. The run ends by an error."""
        self._store.finish(ending=True)

    def close(self, cause: BaseException | None = None) -> None:
        """Let the write in flight end; what went wrong with it is an error still."""
        if cause is not None:
            self.finish_write()
        try:
            self._store.wait()
        except PeerLost as lost:
            if cause is None:
                raise
            self._context.log.warn(f"The checkpoint that was being written is not there: {lost}")

    def _manifest(self, after: Position, plan: Mapping[str, Any], ended: str | None) -> Manifest:
        return Manifest(
            step=after.step,
            epoch=after.epoch,
            world=self._context.world,
            saved_at=time.time(),
            metrics=self.metrics,
            measured=self._measured,
            best=self.best,
            ended=ended,
            config=self._config.model_dump(mode="json"),
            plan=plan,
            versions=versions(),
        )


def _rows(found: Any) -> list[dict[str, Any]]:
    """Return the rows of a survivor's checkpoint, if they are what one writes."""
    rows: list[Any] = found if isinstance(found, list) else [found]
    if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
        raise CheckpointError("the checkpoint's rows for metrics.jsonl are not rows with a step")
    return rows


def _position(point: ResumePoint, saved: Any) -> Position:
    try:
        return Position(**saved)
    except TypeError as error:
        raise CheckpointError(f"{point.folder} has another kind of position: {error}") from None


def _as_json(name: str, value: Any) -> Any:
    try:
        check_values(value)
        check_text(name)
        return parse_json(json.dumps(value))
    except TextError as error:
        raise StepError(f"run.save: {name!a} {error}: a checkpoint could not be read again") from None
    except (TypeError, ValueError):
        raise StepError(
            f"run.save: {name} is a {type(value).__name__}, not a number, text or list of them: give "
            "a tensor as .item() or .tolist()"
        ) from None


def versions() -> dict[str, str]:
    """Return the versions that this process runs on, for the files it writes."""
    return {"samestep": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
