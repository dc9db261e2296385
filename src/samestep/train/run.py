"""A run: what a person's own loop, and ours, is written on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, overload

from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from samestep.config import Config
from samestep.data.batch import Collate, Source
from samestep.data.factory import open_source
from samestep.data.loaders import parts_of
from samestep.data.orders import Order
from samestep.distributed.context import RunContext
from samestep.errors import StepError
from samestep.lanes.rng import BETWEEN
from samestep.optim.schedules import Pace, Schedule
from samestep.step.engine import build_engine, prepare
from samestep.step.lane_passes import LanePasses, StepEngine
from samestep.step.lane_watch import LaneWatch
from samestep.step.step import Step
from samestep.train.loop_schedules import LoopSchedules
from samestep.train.plan_report import report_plan
from samestep.train.run_measures import RunMeasures
from samestep.train.step_sequence import StepSequence

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")


class Run(RunMeasures):
    """One run on this process: prepares objects, gives steps, evaluates, saves and logs.

    `samestep.start` opens one. All ranks make the same calls in the same order.
    """

    def __init__(self, config: Config, context: RunContext) -> None:
        super().__init__(config, context)
        self._watch: LaneWatch | None = None
        self._sequence = StepSequence()
        self._schedules = LoopSchedules.of((), None)

    def __enter__(self) -> Run:
        return self

    @overload
    def prepare(self, a: A, b: B, /) -> tuple[A, B]: ...
    @overload
    def prepare(self, a: A, b: B, c: C, /, *, every: Pace | None = None) -> tuple[A, B, C]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, /, *, every: Pace | None = None
    ) -> tuple[A, B, C, D]: ...
    @overload
    def prepare(self, *objects: Any, every: Pace | None = None) -> Any: ...

    def prepare(self, *objects: Any, every: Pace | None = None) -> Any:
        """Take modules, optimizers and schedulers into the run. Call it once.

        All weights become rank 0's; in a resumed run, all objects get their saved state.

        Args:
            *objects: In any order. The first module is the model. DataLoaders come back as they are;
                without `global_batch`, the first one's batch size is the global batch.
            every: When schedulers move on: with every "step", with every "epoch", or ("call") where the
                loop calls `scheduler.step()`. A `samestep.Schedule` has its own. Unless given it is with
                every step; those that are mostly used by epochs, such as StepLR, must be given it.

        Returns:
            The same objects; at `same: rounding` and `samples` the model comes back wrapped in
            DistributedDataParallel.

        Example:
            model, optimizer, scheduler = run.prepare(model, optimizer, scheduler, every="epoch")
        """
        if self._prepared is not None:
            raise StepError("run.prepare was called twice: give it everything at once")
        self._see([item for item in objects if isinstance(item, DataLoader)])
        schedules = LoopSchedules.of(objects, every)
        others = (DataLoader, LRScheduler, Schedule)
        trained = [item for item in objects if not isinstance(item, others)]
        saver = self._parts.saver
        self._prepared = prepared = prepare(
            self.setup, [*trained, *schedules.by_pace["step"]], saver.prepare
        )
        for name, item in {**prepared.states(), **schedules.kept}.items():
            saver.keep(name, item)
        schedules.take_over(self._before_own_move)
        self._schedules = schedules
        model, wrapped = prepared.modules[0], prepared.reduction.model
        return tuple(wrapped if item is model else item for item in objects)

    def _before_own_move(self) -> None:
        """Before the loop moves a scheduler on itself."""
        if self._passes is not None and not self._passes.updated:
            raise StepError(
                f"scheduler.step() was called in the middle of step {self._passes.data.index}, where each rank "
                "has lanes of its own: call it after step.update()"
            )
        self.sync_update()

    def watch_lanes(self, watch: LaneWatch) -> None:
        """Let an object look into the steps' lanes. Call it before `run.steps`, on every rank."""
        self._watch = watch

    def source(
        self, dataset: Any, order: Order | None = None, collate: Collate | None = None
    ) -> Source:
        """The steps' data, for `run.steps`.

        Args:
            dataset: Map-style, iterable with lane streams, a DataLoader of one, or `samestep.drawn`.
            order: In which order samples are visited; shuffled each epoch unless given.
            collate: Makes a batch of a list of samples; torch's default unless given.
        """
        if isinstance(dataset, DataLoader):
            self._see([dataset])
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
            dataset: Map-style, iterable with lane streams, a DataLoader of one, `samestep.drawn`, or
                what `run.source` returned.
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
        begun = self._parts.saver.position.epoch
        if self.config.epochs is not None and begun >= self.config.epochs:
            self._parts.step_end.report_complete()
        return self._sequence.epochs(begun, self.config.epochs)

    def _all_steps(self, source: Source, draws_between: bool) -> Iterator[Step]:
        engine = self._build_engine(draws_between)
        total = self.total_steps(source)
        plan = report_plan(self.setup, source, total, self._parts.opened.point, self._modules)
        self._parts.saver.begin(self._parts.opened.accept)
        if self._parts.step_end.is_complete(self._parts.saver.position, total):
            self._parts.step_end.report_complete()
            return
        self._parts.result.begin()
        self._parts.log.restart_clock()
        with self._parts.step_end.signals:
            yield from self._train(engine, source, plan, total)
        self._parts.log.flush()
        self._parts.saver.wait()

    def _train(
        self, engine: StepEngine, source: Source, plan: Mapping[str, Any], total: int | None
    ) -> Iterator[Step]:
        activity = self.context.activity
        for data in source.steps(self._parts.saver.position, total):
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
            if data.ends_epoch:
                self._schedules.end_epoch(self.sync_update)
            self._listeners.on_step(step)
            passes.release()
            self._passes = None
            if self._parts.step_end.end(passes, source, plan, total):
                break
            activity.end_step()

    def _build_engine(self, draws_between: bool) -> StepEngine:
        prepared = self._prepared
        if prepared is None:
            raise StepError("run.steps came before run.prepare: prepare model and optimizer first")
        self._parts.step_end.watch(prepared.modules, prepared.optimizers)
        engine = build_engine(
            self.setup,
            prepared,
            self._parts.log.steps,
            flags=self._parts.step_end.flags,
            on_batch=self._listeners.on_batch,
            after_update=self._listeners.updated,
            draws_between=draws_between or self._listeners.draws,
            watch=self._watch,
        )
        self._parts.log.follow(engine.update, engine.guard)
        return engine
