"""A run: what a person's own loop, and ours, is written on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar, overload

from torch import nn
from torch.utils.data import DataLoader

from samestep.checkpoint.state import RunState, Stateful
from samestep.config import Config
from samestep.data.batch import Collate, Moment, Source
from samestep.data.factory import open_source
from samestep.data.loaders import parts_of
from samestep.data.orders import Order
from samestep.distributed.context import RunContext
from samestep.distributed.health.activity import EVALUATE
from samestep.errors import StepError
from samestep.lanes.rng import BETWEEN, INIT
from samestep.run_setup import RunSetup
from samestep.step.engine import Prepared, build_engine, prepare
from samestep.step.lane_passes import LanePasses, LaneWatch, StepEngine
from samestep.step.step import Step
from samestep.train.batchnorm import Forward, measure_batchnorm
from samestep.train.evaluate import Evaluator, Measure, Values
from samestep.train.listeners import Listeners, RunListener
from samestep.train.open_run import open_run
from samestep.train.plan_report import report_plan
from samestep.train.run_end import end_with, with_advice
from samestep.train.run_log import RunLog
from samestep.train.run_place import RunPlace
from samestep.train.saver import Saver
from samestep.train.step_end import StepEnd
from samestep.train.step_sequence import StepSequence
from samestep.train.survivors import Survivors
from samestep.train.trackers import open_trackers

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")


class Run(RunPlace):
    """One run on this process: prepares objects, gives steps, evaluates, saves and logs.

    `samestep.start` opens one. All ranks make the same calls in the same order.
    """

    def __init__(self, config: Config, context: RunContext) -> None:
        setup = self.setup = RunSetup.create(config, context)
        self.run_dir = config.run_path
        """Where the run's files are."""
        self._listeners = Listeners(self.setup.rng)
        with ExitStack() as opening:
            self._opened = open_run(self.setup)
            opening.callback(self._opened.close)
            saver = self._saver = Saver(config, context, self.run_dir, self._opened.point)
            self.start_step = start = saver.position.step
            """The first step of this process's part of the run; 0 unless it was resumed."""
            trackers = open_trackers(config, self.run_dir, context.is_main, start, saver.rows)
            opening.pop_all()
        log = self._log = RunLog(setup, trackers, self._listeners)
        self.survivors = Survivors(setup, saver, log, lambda: self._passes)
        """What saves the run when other ranks are lost."""
        self._step_end = StepEnd(setup, saver, log, self._listeners, self.survivors)
        self._watch: LaneWatch | None = None
        self._prepared: Prepared | None = None
        self._passes: LanePasses | None = None
        self._sequence = StepSequence()
        self.setup.rng.enter(INIT)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        found = end_with(error, self._log.flush, self._listeners.on_end)
        self.survivors.report(found)
        step = None if self._passes is None else self._passes.data.index
        cause = None if found is None else with_advice(found, self.setup, step)
        # The others are notified first: what is still to be written may take long.
        cause = cause if cause is None else self.context.failed(cause)
        with ExitStack() as closing:
            closing.callback(self.context.close)
            closing.callback(self._opened.close)
            closing.callback(self._saver.close)
            closing.callback(self._log.close)
        if cause is not error and cause is not None:
            raise cause from (None if cause is found else found)

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
    def state(self) -> RunState:
        """Everything that the run saves: modules, optimizers, schedules, and what it keeps."""
        return self._saver.state

    @overload
    def prepare(self, a: A, b: B, /) -> tuple[A, B]: ...
    @overload
    def prepare(self, a: A, b: B, c: C, /) -> tuple[A, B, C]: ...
    @overload
    def prepare(self, a: A, b: B, c: C, d: D, /) -> tuple[A, B, C, D]: ...
    @overload
    def prepare(self, *objects: Any) -> Any: ...

    def prepare(self, *objects: Any) -> Any:
        """Take modules, optimizers and per-step schedulers into the run. Call it once.

        All weights become rank 0's; in a resumed run, all objects get their saved state.

        Args:
            *objects: In any order. The first module is the model. DataLoaders come back as they are.

        Returns:
            The same objects; at `same: rounding` and `samples` the model comes back wrapped in
            DistributedDataParallel.

        Example:
            model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
        """
        if self._prepared is not None:
            raise StepError("run.prepare was called twice: give it everything at once")
        trained = [item for item in objects if not isinstance(item, DataLoader)]
        self._prepared = prepared = prepare(self.setup, trained, self._saver.prepare)
        for name, item in prepared.states().items():
            self._saver.keep(name, item)
        model, wrapped = prepared.modules[0], prepared.reduction.model
        return tuple(wrapped if item is model else item for item in objects)

    def keep(self, name: str, item: Stateful) -> None:
        """Save an object's state with the run; in a resumed run it gets that state back.

        Args:
            name: What the checkpoint calls it.
            item: Something with `state_dict()` and `load_state_dict()`, whose state is the same
                on all ranks.
        """
        self._saver.keep(name, item)

    def add_listener(self, listener: RunListener) -> None:
        """Let an object follow the run. Call it before `run.steps`, on every rank.

        Args:
            listener: Its methods are called while the run trains.
        """
        self._listeners.add(listener)

    def watch_lanes(self, watch: LaneWatch) -> None:
        """Let an object look into the steps' lanes. Call it before `run.steps`, on every rank."""
        self._watch = watch

    def source(
        self, dataset: Any, order: Order | None = None, collate: Collate | None = None
    ) -> Source:
        """The steps' data, for `run.steps`.

        Args:
            dataset: Map-style, iterable with lane streams, or a DataLoader of one.
            order: In which order samples are visited; shuffled each epoch unless given.
            collate: Makes a batch of a list of samples; torch's default unless given.
        """
        setup, digest = self.setup, self._listeners.needs_sample_ids
        if isinstance(dataset, DataLoader):
            if order is not None or collate is not None:
                raise StepError("a DataLoader has an order and a collate function of its own")
            parts = parts_of(dataset, setup)
            setup, dataset, order, collate = parts.setup, parts.dataset, parts.order, parts.collate
        return open_source(setup, dataset, order, collate, digest=digest)

    def steps(
        self,
        dataset: Any,
        order: Order | None = None,
        collate: Collate | None = None,
        *,
        draws_between: bool = True,
    ) -> Iterator[Step]:
        """The run's steps over a dataset, or those of an epoch inside `run.epochs()`.

        A resumed run gives those that are left. After each step the run is saved if that is due,
        and stops if a signal requested it.

        Args:
            dataset: Map-style, iterable with lane streams, a DataLoader of one, or what `run.source`
                returned.
            order: In which order samples are visited; shuffled each epoch unless given.
            collate: Makes a batch of a list of samples; torch's default unless given.
            draws_between: Whether random numbers that the loop draws outside of lanes are the
                same on all ranks. A loop that draws none there can save the seeding.

        Example:
            for step in run.steps(loader):
                for x, y in step.batches():
                    step.backward(F.cross_entropy(model(x), y))
                step.update()
        """

        def begin() -> Iterator[Step]:
            is_open = isinstance(dataset, Source)
            source = dataset if is_open else self.source(dataset, order, collate)
            return self._all_steps(source, draws_between)

        return self._sequence.of(dataset, begin)

    def epochs(self) -> Iterator[int]:
        """The numbers of the epochs that are left, for loops with something to do after each.

        Example:
            for epoch in run.epochs():
                for step in run.steps(loader):
                    step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
                run.print(f"epoch {epoch}: loss {step.loss.item():.4f}")
        """
        return self._sequence.epochs(self._saver.position.epoch, self.config.epochs)

    def _all_steps(self, source: Source, draws_between: bool) -> Iterator[Step]:
        engine = self._build_engine(draws_between)
        total = self.total_steps(source)
        plan = report_plan(self.setup, source, total, self._opened.point, self._modules)
        self._saver.begin(self._opened.accept)
        if self._step_end.is_complete(self._saver.position, total):
            self._step_end.report_complete()
            return
        self._log.restart_clock()
        with self._step_end.signals:
            yield from self._train(engine, source, plan, total)
        self._log.flush()
        self._saver.wait()

    def _train(
        self, engine: StepEngine, source: Source, plan: Mapping[str, Any], total: int | None
    ) -> Iterator[Step]:
        activity = self.context.activity
        for data in source.steps(self._saver.position, total):
            activity.begin_step(data.index)
            if self._listeners.draws:
                # A hook may change what this step's forward pass reads.
                engine.update.sync_update()
            passes = self._passes = LanePasses(engine, data)
            step = Step(passes, engine.runner.needs_function)
            self._listeners.begin_step(step)
            if engine.draws_between:
                # A separate position, so that a run resumed here draws as this one does.
                self.setup.rng.enter(BETWEEN, at=(data.index, 1))
            yield step
            if not passes.updated:
                raise StepError(f"step {data.index} was left without step.update: call it once")
            self._listeners.on_step(step)
            passes.release()
            self._passes = None
            if self._step_end.end(passes, source, plan, total):
                break
            activity.end_step()

    def _build_engine(self, draws_between: bool) -> StepEngine:
        prepared = self._prepared
        if prepared is None:
            raise StepError("run.steps came before run.prepare: prepare model and optimizer first")
        self._step_end.watch(prepared.modules, prepared.optimizers)
        engine = build_engine(
            self.setup,
            prepared,
            self._log.steps,
            flags=self._step_end.flags,
            on_batch=self._listeners.on_batch,
            after_update=self._listeners.updated,
            draws_between=draws_between or self._listeners.draws,
            watch=self._watch,
        )
        self._log.follow(engine.update, engine.guard)
        return engine

    def save(self, metrics: Mapping[str, Any] | None = None, *, best: bool = False) -> None:
        """Remember an evaluation's metrics for the checkpoints. Call it on every rank.

        Args:
            metrics: Numbers, text or lists of them, by name.
            best: Whether to save these weights as the best so far, when the step is finished.
        """
        if self._passes is None:
            raise StepError("run.save belongs inside 'for step in run.steps(...)'")
        self._saver.remember(self._passes.data.index + 1, metrics or {}, best)

    def stop(self, reason: str) -> None:
        """Let this step be the run's last one. Call it on every rank.

        Args:
            reason: Kept with the run.
        """
        self._step_end.stop(reason)

    def is_last_step(self, total: int | None) -> bool:
        """Whether the run ends with the current step.

        Args:
            total: How many steps the run has, if that is known.
        """
        passes = self._passes
        return passes is not None and self._step_end.why_last(passes.data, total) is not None

    def pause_after(self, steps: int) -> None:
        """Save and stop after so many steps, as if a signal had requested it."""
        self._step_end.pause_after(steps)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write numbers, tensors, figures to the trackers, once. Call it on every rank or on any."""
        self._log.write(step, values)

    def flush(self) -> None:
        """Read every loss that is still on the device, and write it."""
        self._log.flush()

    def sync_update(self) -> None:
        """Wait until schedules and averages have followed the last update."""
        self._log.sync_update()

    def evaluate(
        self,
        dataset: Any,
        measure: Measure,
        metrics: Mapping[str, Any] | None = None,
        collate: Collate | None = None,
        step: int = 0,
        prefix: str = "",
    ) -> Values:
        """Measure the model on a dataset: each sample once, the same result on every rank.

        Args:
            dataset: A map-style dataset.
            measure: `measure(model, batch, metrics)` updates the metrics and returns the loss as
                (sum, count). It gets the unwrapped model.
            metrics: By name, of torchmetrics, or with `update`, `compute` and a way to merge.
            collate: Makes a batch of a list of samples; torch's default unless given.
            step: The step after which this is measured; random numbers follow from it.
            prefix: Put before every name in the result.

        Returns:
            `val_loss` and every metric, by name; a value inside a metric's result is `NAME/KEY`.
        """
        if self._prepared is None:
            raise StepError("run.evaluate came before run.prepare: prepare the model first")
        self.flush()
        evaluator = Evaluator(self.setup, self._modules)
        moment = Moment(step, lane_count=self.batch.lane_count)
        if self._passes is not None:
            moment = replace(self._passes.moment, step=step)
        with self.context.activity.during(EVALUATE):
            found = evaluator.run(dataset, measure, metrics or {}, collate, moment)
        values = {f"{prefix}{name}": value for name, value in found.items()}
        self.setup.rng.enter(BETWEEN, at=(step,))
        self._log.restart_clock()
        self._listeners.on_evaluation(step, values)
        return values

    def measure_batchnorm(
        self,
        dataset: Any,
        forward: Forward,
        order: Order | None = None,
        collate: Collate | None = None,
    ) -> bool:
        """Measure the statistics of the model's BatchNorm again, over the training set.

        Args:
            dataset: The training set.
            forward: `forward(model, batch)` puts a batch through the model.
            order: In which order samples are visited; shuffled unless given.
            collate: Makes a batch of a list of samples; torch's default unless given.

        Returns:
            False if the model has no BatchNorm.
        """
        with self.context.activity.during(EVALUATE):
            found = measure_batchnorm(self.setup, self._modules, forward, dataset, order, collate)
        self.setup.rng.enter(BETWEEN)
        self._log.restart_clock()
        return found
