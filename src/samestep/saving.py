"""When a run is saved, and what goes into its checkpoints. All ranks decide the same."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.format import Best, Manifest, read_model, read_training
from samestep.checkpoint.resume import ResumePoint
from samestep.checkpoint.snapshot import Snapshot
from samestep.checkpoint.state import RunState, Stateful
from samestep.checkpoint.store import CheckpointStore
from samestep.config import Config
from samestep.data import Position
from samestep.errors import CheckpointError, StepError
from samestep.runtime.context import RunContext
from samestep.runtime.pulse import SAVE

VERSION = "0.1.0"


class Saver:
    """Saves a run by the rules of `checkpoint:`, and brings back what was saved."""

    def __init__(
        self, config: Config, context: RunContext, folder: Path, point: ResumePoint | None
    ) -> None:
        self._config, self._rules, self._context = config, config.checkpoint, context
        self._writes = context.is_main
        self._point = point
        self._store = CheckpointStore(folder / "checkpoints", self._rules.keep_last)
        self._snapshot = Snapshot()
        self._kept: dict[str, Stateful] = {}
        self._loaded: dict[str, Any] | None = None
        self._state: RunState | None = None
        self._clock = time.monotonic()
        self._asked = False
        self._saved_step = 0 if point is None else point.manifest.step
        self._metrics: Mapping[str, Any] = {} if point is None else point.manifest.metrics
        self._best: Best | None = None if point is None else point.manifest.best

    # -- what there is to save -------------------------------------------------------------

    def prepare(self, modules: Any, optimizers: Any, schedules: Any) -> None:
        """Take the run's objects; puts the checkpoint's state into them if there is one."""
        self._state = RunState(modules, optimizers, schedules, self._kept)
        if self._point is not None:
            try:
                self._state.load(read_model(self._point.folder), self._training())
            except CheckpointError as error:
                raise CheckpointError(f"{self._point.folder}: {error}") from error

    def keep(self, name: str, item: Stateful) -> None:
        """Take one more object whose state belongs to the run; brings its state back."""
        if name in self._kept:
            raise StepError(f"run.keep was called twice for {name!r}: give each a name of its own")
        self._kept[name] = item
        if self._point is not None:
            states = self._training()["kept"]
            if name not in states:
                known = ", ".join(states) or "nothing"
                raise CheckpointError(
                    f"{self._point.folder} has no state of {name!r}; it keeps {known}"
                )
            item.load_state_dict(states[name])

    @property
    def position(self) -> Position:
        """Where the run goes on."""
        return Position() if self._point is None else Position(**self._training()["position"])

    @property
    def ended(self) -> str | None:
        """Why the run that goes on was over already, unless that was its length."""
        return None if self._point is None else self._point.manifest.ended

    def _training(self) -> dict[str, Any]:
        if self._loaded is None:
            assert self._point is not None, "asked only where there is a checkpoint"
            self._loaded = read_training(self._point.folder)
        return self._loaded

    # -- when ------------------------------------------------------------------------------

    def ask(self, step: int, metrics: Mapping[str, Any], best: bool) -> None:
        """Remember an evaluation; a new best is saved when its step is over."""
        self._metrics = dict(metrics)
        if best:
            metric = self._config.best.metric
            self._best = Best(step, metric, float(metrics.get(metric, float("nan"))))
            self._asked = True

    @property
    def clock_is_up(self) -> bool:
        """Whether every_minutes have passed here; rank 0's clock is what all ranks go by."""
        minutes = self._rules.every_minutes
        if minutes is None or not self._writes:
            return False
        return time.monotonic() - self._clock > 60 * minutes

    def is_due(self, steps: int, epochs: int, ends_epoch: bool) -> bool:
        """Whether the run is to be saved after so many steps, and epochs if one has ended."""
        rules = self._rules
        by_steps = rules.every_steps and steps % rules.every_steps == 0
        by_epochs = rules.every_epochs and ends_epoch and epochs % rules.every_epochs == 0
        return self._asked or bool(by_steps) or bool(by_epochs)

    # -- saving ----------------------------------------------------------------------------

    def save(self, after: Position, plan: Mapping[str, Any], ended: str | None) -> None:
        """Save the run as it stands after a step; every rank calls this, rank 0 writes."""
        self._asked = False
        self._clock = time.monotonic()
        if not self._rules.enabled or after.step == self._saved_step:
            return
        self._saved_step = after.step
        if not self._writes:
            return
        with self._context.pulse.during(SAVE):
            assert self._state is not None, "steps come after prepare"
            training = {**self._state.training(), "position": vars(after)}
            training["seed"] = self._config.seed
            self._store.wait()  # the buffers are the last write's until it is through
            copy = self._snapshot.take({"model": self._state.model_tensors(), "training": training})
            manifest = self._manifest(after, plan, ended)
            self._store.write(copy["model"], copy["training"], manifest)
            if not self._rules.asynchronous:
                self._store.wait()

    def wait(self) -> None:
        """Wait until what was saved is on the disk."""
        with self._context.pulse.during(SAVE):
            self._store.wait()

    def close(self) -> None:
        """Let the write in flight end; what went wrong with it is an error still."""
        self._store.wait()

    def _manifest(self, after: Position, plan: Mapping[str, Any], ended: str | None) -> Manifest:
        return Manifest(
            step=after.step,
            epoch=after.epoch,
            world=self._context.world,
            saved_at=time.time(),
            metrics=self._metrics,
            best=self._best,
            ended=ended,
            config=self._config.model_dump(mode="json"),
            plan=plan,
            versions={
                "samestep": VERSION,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
        )
