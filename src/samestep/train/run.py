"""A run: what a person's own loop, and ours, is written on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from samestep.config import Config
from samestep.data.batch import Collate, Source
from samestep.data.factory import open_source
from samestep.data.loaders import parts_of
from samestep.data.orders import Order
from samestep.distributed.context import RunContext
from samestep.errors import StepError
from samestep.lanes.rng import BETWEEN, EPOCH
from samestep.optim.schedules import Pace, Schedule
from samestep.step.engine import build_engine, prepare
from samestep.step.lane_passes import LanePasses, StepEngine
from samestep.step.lane_turns import LaneTurns
from samestep.step.lane_watch import LaneWatch
from samestep.step.loss_terms import Term
from samestep.step.step import Step, loss_value
from samestep.step.turn_checks import BackwardPasses
from samestep.train.loop_schedules import LoopSchedules
from samestep.train.plan_report import report_plan
from samestep.train.run_loader import RunLoader, unwrapped
from samestep.train.run_measures import RunMeasures
from samestep.train.step_sequence import StepSequence

LEFT = "its own loop"
"""What has stopped a run that its loop left, by `break` for example."""

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
        self._earlier: WeakSet[Any] = WeakSet()
        self._sequence = StepSequence()
        self._schedules = LoopSchedules.of((), None)
        self._turns: LaneTurns | None = None
        """The step whose lanes a loop over the loader is in."""

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
            *objects: In any order. The first module is the model. The first DataLoader is that of the
                training data; without `global_batch`, its batch size is the global batch.
            every: When schedulers move on: with every "step", with every "epoch", or ("call") where the
                loop calls `scheduler.step()`. A `samestep.Schedule` has its own. Unless given it is with
                every step; those that are mostly used by epochs, such as StepLR, must be given it.

        Returns:
            The same objects; at `same: rounding` and `samples` the model comes back wrapped in
            DistributedDataParallel. Loops over the DataLoaders get this rank's part: of the first the
            lanes of the run's steps, of others what `run.batches` gives.

        Example:
            model, optimizer, loader, valid_loader = run.prepare(model, optimizer, loader, valid_loader)
        """
        if self._prepared is not None:
            raise StepError("run.prepare was called twice: give it everything at once")
        loaders = [item for item in objects if isinstance(item, DataLoader)]
        self._see(loaders)
        schedules = LoopSchedules.of(objects, every)
        others = (DataLoader, LRScheduler, Schedule)
        trained = [item for item in objects if not isinstance(item, others)]
        saver = self._parts.saver
        self._warn_of_earlier(trained)
        self._prepared = prepared = prepare(
            self.setup, [*trained, *schedules.by_pace["step"]], saver.prepare
        )
        for name, item in {**prepared.states(), **schedules.kept}.items():
            saver.keep(name, item)
        schedules.take_over(self._may_move)
        self._schedules = schedules
        taken: dict[int, Any] = {id(prepared.modules[0]): prepared.reduction.model}
        for loader in loaders:
            batches = self._lane_batches if loader is loaders[0] else self.batches
            taken[id(loader)] = RunLoader(loader, batches)
        return tuple(taken.get(id(item), item) for item in objects)

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

    def _may_move(self, scheduler: LRScheduler, *values: Any) -> bool:
        """Whether the loop may move a scheduler on itself, now; not in turns before a step's last."""
        if self._turns is not None:
            self._turns.note(type(scheduler).__name__, (id(scheduler), *values))
        if not self.ends_step:
            return False
        if self._passes is not None and not self._passes.updated:
            raise StepError(
                f"scheduler.step() was called in the middle of step {self._passes.data.index}, where each rank "
                "has lanes of its own: call it after the update"
            )
        self.sync_update()
        return True

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
        dataset = unwrapped(dataset)
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
        data = unwrapped(dataset)

        def begin() -> Iterator[Step]:
            source = data if isinstance(data, Source) else self.source(data, order, collate)
            return self._all_steps(source, draws_between)

        for number, step in enumerate(self._sequence.of(data, begin)):
            if number == 0 and draws_between:
                # An epoch's first step was opened before the loop drew at the top of the epoch.
                self._enter_between(step.index)
            yield step

    def _enter_between(self, step: int) -> None:
        # A separate position, so that a run resumed here draws as this one does.
        self.setup.rng.enter(BETWEEN, at=(step, 1))

    def enumerate(self, dataset: Any) -> Iterator[tuple[int, Any]]:
        """The lanes of an epoch's steps, one by one, for loops that step their optimizer themselves.

        `for batch in loader` is the same, of the training DataLoader that `run.prepare` returned. Each
        turn of the loop calls `run.backward(loss)` and `optimizer.step()`; in a step's last turn `.grad`
        is the mean over all lanes of all ranks, and the optimizer's step counts.

        Args:
            dataset: As for `steps`.

        Returns:
            The step's number in its epoch, which does not depend on the number of ranks, and a batch.

        Example:
            for i, (x, y) in run.enumerate(loader):
                optimizer.zero_grad()
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
        """
        if self._prepared is None:
            raise StepError(
                "the loop over the data came before run.prepare: prepare the model first"
            )
        self._refuse_turns()
        self._prepared.calls.answer(self._step_by_loop)
        if len(self._prepared.optimizers) > 1:
            # One of them steps in a step; parameters of the others may have no part in its loss.
            self._prepared.reduction.gradients.usage_varies = True
        backwards = BackwardPasses(self._prepared.params)
        try:
            for done, step in enumerate(self.steps(dataset)):
                assert self._passes is not None, "a step is open"
                self._turns = LaneTurns(self._passes, self._modules, backwards, done)
                for batch in self._turns.batches():
                    yield step.epoch_step, batch
                self._turns = None
        finally:
            backwards.close()

    def _lane_batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        for _, batch in self.enumerate(loader):
            yield batch

    def _refuse_turns(self) -> None:
        epochs = self.config.epochs
        if epochs is not None and epochs > 1 and not self._sequence.by_epochs:
            raise StepError(
                f"a loop over the loader has the turns of all {epochs} epochs if nobody asks for epochs: write "
                "for epoch in run.epochs(): for batch in loader"
            )
        most = max(len(units) for units in self.setup.assignment.by_rank)
        if self.config.same != "bits" and most > 1:
            raise StepError(
                f"same: {self.config.same} adds up the gradients of a rank's {most} lanes in .grad, which the "
                "loop's zero_grad would clear: use same: bits, as many lanes as ranks, or run.steps(loader)"
            )

    def backward(
        self,
        loss: Tensor | Mapping[str, Term],
        count: Tensor | float | None = None,
        *,
        mean_over: Tensor | float | None = None,
    ) -> Tensor:
        """In a loop over the loader: what `step.backward` is in a loop over `run.steps`.

        Args:
            loss: A mean over the batch's samples; or, with `count`, a sum.
            count: How many things the loss was summed over.
            mean_over: How many things the loss is a mean over, where these are not the samples.

        Returns:
            The mean loss of this turn's lane; in a step's last turn, that of the whole global batch, which
            is the same at any number of ranks. On the device, without a graph.
        """
        if self._turns is None:
            raise StepError(
                "run.backward belongs inside a loop over the training loader that run.prepare returned; inside "
                "run.steps it is step.backward"
            )
        return self._turns.backward(loss_value(loss, count, mean_over))

    def _step_by_loop(self, optimizer: Optimizer) -> None:
        if self._turns is None:
            raise StepError(
                f"{type(optimizer).__name__}.step() was called outside of the loop over the training loader"
            )
        self._turns.step(optimizer)

    def print(self, *values: Any, sep: str = " ", end: str = "\n") -> None:
        """`print`, once for the run: on rank 0; in a loop over the loader, in a step's last turn."""
        if self.ends_step:
            super().print(*values, sep=sep, end=end)

    @property
    def _left(self) -> str:
        return "" if self._turns is None else self._turns.left

    def _end_left_steps(self) -> None:
        """Save a run whose loop has left it before its last step, as its last step would have been."""
        saves = self.config.checkpoint.enabled
        if saves and self._passes is not None and self._passes.updated:
            self._parts.step_end.stop(LEFT)
            self._sequence.finish()

    def _close_steps(self) -> None:
        self._sequence.close()

    @property
    def ends_step(self) -> bool:
        """False in the turns of a loop over the loader that come before a step's last."""
        return self._turns is None or self._turns.is_last

    def epochs(self) -> Iterator[int]:
        """The numbers of the epochs that are left, for loops with something to do after each.

        Example:
            for epoch in run.epochs():
                for step in run.steps(loader):
                    step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
                run.print(f"epoch {epoch}: loss {step.loss.item():.4f}")
        """
        begun = self._parts.saver.position
        if self._parts.step_end.is_complete(begun, self.config.steps):
            self._parts.step_end.report_complete()
            return
        for epoch in self._sequence.epochs(begun.epoch, self.config.epochs):
            self.setup.rng.enter(EPOCH, at=(epoch,))
            yield epoch

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
                self._enter_between(data.index)
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
