"""The part of a run besides its steps: its state, its checkpoints, its logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.utils.data import DataLoader

from samestep.checkpoint.state import RunState, Stateful
from samestep.config import Config
from samestep.data.loader_parts import batch_size_of
from samestep.distributed.context import RunContext
from samestep.distributed.health.watchdog import Reminder
from samestep.errors import StepError
from samestep.lanes.random_streams import BETWEEN, INIT
from samestep.reduce.owners import Owners
from samestep.run.emergency_save import EmergencySaver
from samestep.run.open_run import open_run
from samestep.run.origin import name_for
from samestep.run.ranks_file import RanksFile
from samestep.run.result_file import ResultFile
from samestep.run.run_end import close_at_exit, end_with, shown_error, with_advice
from samestep.run.run_log import RunLog
from samestep.run.run_place import RunPlace
from samestep.run.saver import Saver
from samestep.run.step_end import StepEnd
from samestep.run_setup import RunSetup
from samestep.step.build_engine import Prepared
from samestep.step.lane_passes import LanePasses
from samestep.step.loop_body import LoopBody
from samestep.tracking.listeners import Listeners, RunListener
from samestep.tracking.trackers import open_trackers


class RunParts:
    """A run's files and what acts at the end of its steps.

    All of them write or compare the config, so they are opened when it is complete.
    """

    def __init__(self, setup: RunSetup, listeners: Listeners, passes: Callable[[], LanePasses | None]) -> None:
        """Args:
        setup: The run's setup, its global batch known.
        listeners: What follows the run.
        passes: The step that is running, if one is.
        """
        config, context = setup.config, setup.context
        with ExitStack() as opening:
            self.opened = open_run(setup)
            opening.callback(self.opened.close)
            saver = self.saver = Saver(config, context, config.run_path, self.opened.point)
            trackers = open_trackers(config, config.run_path, context.is_main, saver.position.step, saver.rows)
            opening.pop_all()
        log = self.log = RunLog(setup, trackers, listeners)
        self.survivors = EmergencySaver(setup, saver, log, passes)
        self.step_end = StepEnd(setup, saver, log, listeners, self.survivors)
        self.result = ResultFile(setup, self.opened, saver, self.step_end)
        self.ranks = RanksFile(setup, self.opened)
        listeners.add(self.result)

    def close(self, cause: BaseException | None = None) -> None:
        """Write what is left, and let others use the directory.

        Args:
            cause: What ended the run, if something did.
        """
        with ExitStack() as closing:
            closing.callback(self.opened.close)
            # An error of what is closed before it is the run's, unless that has one of its own.
            closing.push(lambda kind, error, trace: self.result.end(cause or error))
            closing.callback(self.ranks.end)
            closing.callback(self.saver.close, cause)
            closing.callback(self.log.close)


class RunFiles(RunPlace):
    """A run's objects and where they are saved; opened when its global batch is known."""

    def __init__(self, config: Config, context: RunContext) -> None:
        self.setup = RunSetup.create(config, context)
        self.run_dir = config.run_path
        """Where the run's files are."""
        self._listeners = Listeners(self.setup.rng)
        self._prepared: Prepared | None = None
        self._passes: LanePasses | None = None
        self._body: LoopBody | None = None
        """The body of a loop over the loader that is running."""
        self._opened_parts: RunParts | None = None
        self._once_open: list[Callable[[RunParts], None]] = []
        self._is_over = False
        self._begins = True
        """Whether no step has begun in this process, and the loop has drawn nothing outside of lanes."""
        self._at_exit: Finalize | None = None
        self._earlier: WeakSet[Any] = WeakSet()
        if self.setup.planned is not None:
            self._open()
        self.setup.rng.enter(INIT)

    def _open(self) -> None:
        name = None
        if self.context.is_main:
            name = name_for(self.config, self.context.log.main)
        name = self.context.broadcast(name)
        if name != self.config.name:
            config = self.config.model_copy(update={"name": name})
            self.setup = replace(self.setup, config=config)
            self.run_dir = config.run_path
        parts = self._opened_parts = RunParts(self.setup, self._listeners, lambda: self._passes)
        while self._once_open:
            self._once_open.pop(0)(parts)

    def _see(self, loaders: Sequence[DataLoader[Any]]) -> None:
        """Take the global batch from the first of the loaders, if nothing else has set it."""
        if self.setup.planned is None and loaders:
            self.setup = self.setup.with_batch(batch_size_of(loaders[0]))
            self._open()

    @property
    def _parts(self) -> RunParts:
        if self._opened_parts is None:
            raise StepError(
                "global_batch is not set, and the run has seen no DataLoader to take it from: call run.prepare "
                "with the training DataLoader among its arguments first, or set global_batch"
            )
        return self._opened_parts

    def _with_parts(self, act: Callable[[RunParts], None]) -> None:
        """Now, or when the run is opened."""
        if self._opened_parts is None:
            self._once_open.append(act)
        else:
            act(self._opened_parts)

    @property
    def start_step(self) -> int:
        """The first step of this process's part of the run; 0 unless it was resumed."""
        return self._parts.saver.position.step

    def _draw_as_interrupted(self) -> None:
        """After `run.prepare`, before the first step of a resumed run: draw what the loop drew after the last one."""
        if self._begins and self._prepared is not None:
            self._begins = False
            if at := self._parts.saver.position.draws:
                self.setup.rng.enter(BETWEEN, at=at)

    @property
    def survivors(self) -> EmergencySaver:
        """Return what saves the run when other ranks are lost."""
        return self._parts.survivors

    def note_earlier(self, modules: Sequence[nn.Module]) -> None:
        """Take the modules that were made before the run was opened."""
        self._earlier = WeakSet(modules)

    def _warn_of_earlier(self, objects: Sequence[Any]) -> None:
        modules = [item for item in objects if isinstance(item, nn.Module)]
        found = [type(module).__name__ for module in modules if module in self._earlier]
        if found and self._parts.opened.point is None:
            self.context.log.main(
                f"Warning: {', '.join(found)} was made before samestep.start: its first weights do not follow "
                f"from seed {self.config.seed}, and another start may have others. Make it after samestep.start"
            )

    def close_at_exit(self) -> None:
        """Close the run when the process ends, for scripts that do not open it with `with`."""
        # Unlike atexit's, these are called in processes that multiprocessing forked, too.
        self._at_exit = Finalize(None, partial(close_at_exit, self.__exit__, shown_error()), exitpriority=0)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._at_exit is not None:
            self._at_exit.cancel()
        parts = self._opened_parts
        found = error
        if parts is not None:
            last = (self._end_left_steps, parts.log.flush, self._notify_end)
            found = end_with(error, *last)
            parts.survivors.report(found)
        step = None if self._passes is None else self._passes.data.index
        cause = None if found is None else with_advice(found, self.setup, step)
        # The others are notified first: what is still to be written may take long.
        cause = cause if cause is None else self.context.failed(cause)
        with ExitStack() as closing:
            closing.callback(self.context.close)
            closing.callback(self._close_steps)
            if self._prepared is not None:
                closing.callback(self._prepared.step_guard.close)
            if parts is not None:
                closing.callback(parts.close, cause)
        if cause is not error and cause is not None:
            raise cause from (None if cause is found else found)

    def _notify_end(self) -> None:
        with self.reminded("on_end"):
            self._listeners.on_end()

    def reminded(self, what: str) -> Reminder:
        """While entered, what takes longer than distributed.timeout is reported, with its stack."""
        return Reminder(what, self.config.distributed.timeout, self.context.log.warn)

    def _end_left_steps(self) -> None:
        """End the step in which a loop has left the run, if one has."""

    def _close_steps(self) -> None:
        """Leave the step that the run is in, whatever has ended it."""

    @property
    def model(self) -> nn.Module:
        """The prepared model, unwrapped."""
        return self._modules[0]

    @property
    def _modules(self) -> Sequence[nn.Module]:
        if self._prepared is None:
            raise StepError("there is no model yet: call run.prepare first")
        return self._prepared.modules

    @property
    def owners(self) -> Owners | None:
        """Return which rank owns which parameter; None unless `distributed.shard` deals them out."""
        sharding = None if self._prepared is None else self._prepared.reduction.owned_update
        return None if sharding is None else sharding.owners

    @property
    def _shard(self) -> str:
        """The summary of `distributed.shard` for the plan; empty without it."""
        sharding = None if self._prepared is None else self._prepared.reduction.owned_update
        return "" if sharding is None else sharding.summary

    @property
    def state(self) -> RunState:
        """Everything that the run saves: modules, optimizers, schedules, and what it keeps."""
        return self._parts.saver.state

    def whole_state(self) -> AbstractContextManager[None]:
        """Return what lets rank 0 have all of `state`, where `distributed.shard` deals it out. Every rank enters it.

        Example:
            with run.whole_state():
                if run.is_main:
                    torch.save(optimizer.state_dict(), "optimizer.pt")
        """
        return self._parts.saver.whole_state()

    def register(self, name: str, item: Stateful) -> None:
        """Save an object's state with the run; in a resumed run it gets that state back.

        Args:
            name: What the checkpoint calls it.
            item: Something with `state_dict()` and `load_state_dict()`, whose state is the same
                on all ranks.

        Example:
            run.register("curriculum", curriculum)
        """
        self._with_parts(lambda parts: parts.saver.keep(name, item))

    def add_listener(self, listener: RunListener) -> None:
        """Let an object follow the run. Call it before `run.steps`, on every rank.

        Args:
            listener: Its methods are called while the run trains.
        """
        self._listeners.add(listener)

    def save(self, metrics: Mapping[str, Any] | None = None, *, best: bool = False) -> None:
        """Save the run with this step, when the loop's body is through. Call it on every rank.

        Not in its middle: a resumed run begins with the next step, and what the rest of the body does
        must be in the checkpoint. After the last step of an epoch in `run.epochs()`, what is still
        to come of that epoch belongs to it. Nothing is saved where `checkpoint.enabled` is false.

        Args:
            metrics: Numbers, text or lists of them by name, for the checkpoint.
            best: Whether these weights are the best so far.

        Example:
            optimizer.step()
            if run.step % 1000 == 999:
                run.save()
        """
        passes = self._passes_of("run.save")
        if not passes.updated and self._body is None:
            raise StepError(
                f"run.save came before the update of step {passes.data.index}: a checkpoint is of whole "
                "steps. Call it after step.train(...)"
            )
        if metrics is not None or best:
            self.record_metrics(metrics or {}, best=best)
        self._parts.saver.requested = True

    def record_metrics(self, metrics: Mapping[str, Any], *, best: bool = False) -> None:
        """Remember an evaluation's metrics for the checkpoints. Call it on every rank.

        Args:
            metrics: Numbers, text or lists of them, by name.
            best: Whether to save these weights as the best so far, when the step is finished.

        Example:
            run.record_metrics({"accuracy": accuracy}, best=accuracy > highest)
        """
        index = self._passes_of("run.record_metrics").data.index
        self._parts.saver.remember(index + 1, metrics, best)

    def _passes_of(self, caller: str) -> LanePasses:
        if self._passes is None:
            raise StepError(
                f"{caller} belongs inside the loop over the training data: a run is saved with a step, and at its "
                "end by itself"
            )
        return self._passes

    def stop(self, reason: str) -> None:
        """Let this step be the run's last one. Call it on every rank.

        Args:
            reason: Kept with the run.
        """
        self._parts.step_end.stop_reason = reason

    @property
    def is_stopping(self) -> bool:
        """Return whether a signal has asked this rank to stop the run; the others learn it with the next step."""
        return self._parts.step_end.signals.is_stopping

    def is_last_step(self, total: int | None) -> bool:
        """Return whether the run ends with the current step.

        Args:
            total: How many steps the run has, if that is known.
        """
        passes = self._passes
        return passes is not None and self._parts.step_end.why_last(passes.data, total) is not None

    def pause_after(self, steps: int) -> None:
        """Save and stop after so many steps, as if a signal had requested it."""
        self._with_parts(lambda parts: setattr(parts.step_end, "pause_after", steps))

    @property
    def step(self) -> int:
        """The number of the step that the loop is in, from 0; also after the last step of an epoch."""
        return self._passes_of("run.step").data.index

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write numbers, tensors, figures to the trackers, once. Call it on every rank or on any.

        Example:
            run.log(run.step, {"learning_rate": scheduler.get_last_lr()[0]})
        """
        self._parts.log.write(step, values)

    def flush(self) -> None:
        """Read every loss that is still on the device, and write it."""
        self._parts.log.flush()

    def sync_update(self) -> None:
        """Wait until schedules and averages have followed the last update."""
        self._parts.log.sync_update()
