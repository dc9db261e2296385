"""A run: what a person's own loop, and ours, is written on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, overload

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import TypeVarTuple, Unpack

from samestep.config import Config
from samestep.data.batch import Collate, Source
from samestep.data.factory import open_source
from samestep.data.loader_parts import parts_of
from samestep.data.orders import Order
from samestep.distributed.context import RunContext
from samestep.errors import StepError
from samestep.lanes.random_streams import BETWEEN, EPOCH
from samestep.optim.loss_scale import grad_scalers
from samestep.optim.schedules import Schedule
from samestep.run.loader_loops import LoaderLoop, RunLoader, SecondLoader, is_bar_over_loader, unwrapped
from samestep.run.loop_schedules import LoopSchedules
from samestep.run.plan_report import report_plan
from samestep.run.run_measures import RunMeasures
from samestep.run.step_sequence import StepSequence
from samestep.step.build_engine import build_engine, prepare
from samestep.step.engine import LaneWatch, StepEngine
from samestep.step.lane_passes import LanePasses
from samestep.step.lane_tensor import LaneTensor
from samestep.step.loop_body import Reduction
from samestep.step.loss_terms import Term, loss_value
from samestep.step.module_calls import functions_per_lane
from samestep.step.step import Step

LEFT = "its own loop"
"""What has stopped a run that its loop left, by `break` for example."""

A = TypeVar("A")
B = TypeVar("B")
More = TypeVarTuple("More")


class Run(RunMeasures):
    """One run on this process: prepares objects, gives steps, evaluates, saves and logs.

    `samestep.start` opens one. All ranks make the same calls in the same order.

        with samestep.start(epochs=3) as run:
            model, optimizer, loader = run.prepare(model, optimizer, loader)
    """

    def __init__(self, config: Config, context: RunContext) -> None:
        super().__init__(config, context)
        self._watch: LaneWatch | None = None
        self._sequence = StepSequence()
        self._schedules = LoopSchedules()
        self._loop: LoaderLoop | None = None
        """The loop over the training loader, if there is one."""

    def __enter__(self) -> Run:
        return self

    @overload
    def prepare(self, first: A, second: B, /, *more: Unpack[More]) -> tuple[A, B, Unpack[More]]: ...
    @overload
    def prepare(self, only: A, /) -> A: ...

    def prepare(self, *objects: Any) -> Any:  # type: ignore[misc]  # mypy takes `more` for a keyword, too
        """Take modules, optimizers, schedulers, a GradScaler and loaders into the run. Call it once.

        All weights become rank 0's; in a resumed run, all objects get their saved state.

        Args:
            *objects: In any order. The first module is the model. The first DataLoader is that of the
                training data; without `global_batch`, its batch size is the global batch. Schedulers move
                on where the loop calls their `step`; a `samestep.Schedule` is moved on by the run.

        Returns:
            The same objects; at `same: rounding` and `samples` the model comes back wrapped in
            DistributedDataParallel. Loops over the DataLoaders get this rank's part: of the first the
            steps of the run, of others what `run.eval_batches` gives.

        Example:
            model, optimizer, loader, valid_loader = run.prepare(model, optimizer, loader, valid_loader)
        """
        if self._prepared is not None:
            raise StepError("run.prepare was called twice: give it everything at once")
        loaders = [item for item in objects if isinstance(item, DataLoader)]
        self._see(loaders)
        schedules = LoopSchedules.of(objects)
        others = (DataLoader, LRScheduler, Schedule, GradScaler)
        trained = [item for item in objects if not isinstance(item, others)]
        saver = self._parts.saver
        self._warn_of_earlier(trained)
        self._prepared = prepared = prepare(
            self.setup, [*trained, *schedules.per_step], saver.prepare, saver.is_resumed
        )
        saver.owned_states = prepared.owned_states
        for name, item in {**prepared.states(), **schedules.kept, **grad_scalers(objects)}.items():
            saver.keep(name, item)
        schedules.take_over(self._before_schedule)
        self._schedules = schedules
        taken: dict[int, Any] = {id(prepared.modules[0]): prepared.reduction.model}
        for number, loader in enumerate(loaders):
            taken[id(loader)] = RunLoader(loader, self._batches_of(number, loader))
        return tuple(taken.get(id(item), item) for item in objects)

    def _before_schedule(self) -> None:
        """Before the loop moves a scheduler on."""
        if self._passes is not None and self._passes.in_lane:
            raise StepError(
                f"scheduler.step() was called in the middle of step {self._passes.data.index}, where each rank "
                "has lanes of its own: call it after the update"
            )
        self.sync_update()

    def watch_lanes(self, watch: LaneWatch) -> None:
        """Let an object look into the steps' lanes. Call it before `run.steps`, on every rank."""
        self._watch = watch

    def source(self, dataset: Any, order: Order | None = None, collate: Collate | None = None) -> Source:
        """Return the steps' data, for `run.steps`.

        Args:
            dataset: Map-style, iterable with lane streams, a DataLoader of one, or `samestep.Generated`.
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
        self, dataset: Any, order: Order | None = None, collate: Collate | None = None, *, draws_between: bool = True
    ) -> Iterator[Step]:
        """Yield the run's steps over a dataset, or those of an epoch inside `run.epochs()`.

        A resumed run gives those that are left. After each step the run is saved if that is due,
        and stops if a signal requested it.

        Args:
            dataset: Map-style, iterable with lane streams, a DataLoader of one, `samestep.Generated`, or
                what `run.source` returned.
            order: In which order samples are visited; shuffled each epoch unless given.
            collate: Makes a batch of a list of samples; torch's default unless given.
            draws_between: Whether random numbers that the loop draws outside of lanes are the
                same on all ranks. A loop that draws none there can save the seeding.

        Example:
            for step in run.steps(loader):
                step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
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
        """Yield the steps of an epoch with their numbers, for loops that step their optimizer themselves.

        `for batch in loader` is the same without numbers, of the training DataLoader that `run.prepare`
        returned. The body runs once per step on every rank, with the batches of the rank's lanes.

        Args:
            dataset: As for `steps`.

        Returns:
            The step's number in its epoch, also in a resumed run, and a batch.

        Example:
            for i, (x, y) in run.enumerate(loader):
                optimizer.zero_grad()
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
        """
        if self._prepared is None:
            raise StepError("the loop over the data came before run.prepare: prepare the model first")
        if is_bar_over_loader(dataset):
            yield from ((self._passes_of("run.enumerate").data.epoch_step, x) for x in dataset)
            return
        self._prepared.step_guard.answer(self._step_by_loop, self._outside_lanes)
        if self._loop is None:
            self._loop = LoaderLoop(self.setup, self._prepared, self._parts.saver)
        trained = True
        with functions_per_lane():
            for number, step in enumerate(self.steps(dataset)):
                trained = trained and number > 0
                assert self._passes is not None, "a step is open"
                by_epochs = number == 0 or self._sequence.epoch is not None
                body = self._body = self._loop.body(self._passes, by_epochs, self._evaluates)
                try:
                    yield step.epoch_step, body.enter()
                except GeneratorExit:
                    if not body.is_begun:
                        self._sequence.give_back(step, number == 0)
                    raise
                finally:
                    body.leave()
                trained = trained or body.is_begun
                body.end()
                self._body = None
        if not trained:
            raise StepError(
                "the loop's body has called no backward pass in an epoch: x.size(0) is the size of a lane "
                f"({self.batch.lane_batch}), not of the global batch ({self.batch.global_batch})"
            )

    def _batches_of(self, number: int, loader: DataLoader[Any]) -> Callable[[Any], Iterator[Any]]:
        if number == 0:
            return lambda loader: (batch for _, batch in self.enumerate(loader))
        second = SecondLoader(
            number, loader, self.setup, self.eval_batches, lambda: self._sequence.epoch,
            lambda: None if self._body is None or self._passes is None else (self._passes, self._body),
        )  # fmt: skip
        self._parts.saver.keep_if_used(f"loader {number}", second)
        return second.batches

    def backward(
        self,
        loss: Tensor | Mapping[str, Term],
        count: Tensor | float | None = None,
        *,
        mean_over: Tensor | float | None = None,
        reduction: Reduction = "mean",
        retain_graph: bool = False,
    ) -> Tensor:
        """Backpropagate the loss of a batch, and add the mean over the global batch to `.grad`.

        For loops over the training loader, in place of `loss.backward()`, any number of times per step.

        Args:
            loss: A mean over the batch's samples; or, with `count`, a sum.
            count: How many things the loss was summed over: `.grad` is the mean over all of them.
            mean_over: How many things the loss is a mean over, where these are not the samples.
            reduction: "sum" if the loss is a sum over the batch's samples, and `.grad` is to be that of the
                sum over the global batch.
            retain_graph: Whether the graph is kept for another backward pass.

        Returns:
            The loss of the whole global batch, which is the same at any number of ranks. On the device,
            without a graph.
        """
        if self._body is None:
            raise StepError(
                "run.backward belongs inside a loop over the training loader that run.prepare returned; inside "
                "run.steps it is step.train(function)"
            )
        is_its_mean = count is None
        if reduction == "sum" and count is None and mean_over is None:
            count = self._body.samples
        value = loss_value(loss, count, mean_over)
        batch_loss = self._body.backward(value, reduction=reduction, retain_graph=retain_graph)
        if is_its_mean and isinstance(loss, LaneTensor):
            loss.batch_mean = batch_loss  # for loss.item()
        return batch_loss()

    def _step_by_loop(self, optimizer: Optimizer) -> None:
        if self._body is None:
            raise StepError(
                f"{type(optimizer).__name__}.step() was called outside of the loop over the training loader"
            )
        self._body.step(optimizer)

    def _end_left_steps(self) -> None:
        """End the step that a loop has left, and save the run, as after its last step."""
        if self._passes is None or (self._body is None and not self.config.checkpoint.enabled):
            return  # a search for a learning rate, say, leaves where the loss is no longer finite
        if self._body is not None and not self._body.is_begun:
            self._parts.step_end.leave(LEFT)
            return
        if self._body is not None:
            self._body.end()
        if self._passes.updated:
            self._parts.step_end.stop_reason = LEFT
            self._sequence.finish()

    def _close_steps(self) -> None:
        if self._body is not None:
            self._body.leave()
        if self._loop is not None:
            self._loop.close()
        self._sequence.close()

    def epochs(self) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, for loops with something to do after each.

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
        point = self._parts.opened.point
        plan = report_plan(self.setup, source, total, point, self._modules, self._shard)
        self._parts.saver.begin(self._parts.opened.accept)
        if self._parts.step_end.is_complete(self._parts.saver.position, total):
            self._parts.step_end.report_complete()
            return
        self._parts.result.begin()
        self._parts.ranks.begin(self.start_step)
        self._begins = False
        self._parts.log.steps.restart_clock()
        with self._parts.step_end.signals:
            yield from self._train(engine, source, plan, total)
        self._parts.log.flush()
        self._parts.saver.wait()

    def _train(self, engine: StepEngine, source: Source, plan: Mapping[str, Any], total: int | None) -> Iterator[Step]:
        activity = self.context.activity
        for data in source.steps(self._parts.saver.position, total):
            activity.begin_step(data.index)
            if self._listeners.draws:
                # A hook may change what this step's forward pass reads.
                engine.update.sync_update()
            passes = self._passes = LanePasses(engine, data)
            step = Step(passes)
            self._listeners.begin_step(step)
            if engine.draws_between:
                self._enter_between(data.index)
            yield step
            if not passes.updated:
                raise StepError(f"step {data.index} was left without step.train: call it once")
            if data.ends_epoch:
                self._schedules.end_epoch(self.sync_update)
            self._listeners.on_step(step)
            passes.batches.release()
            self._passes = None
            if self._parts.step_end.end(passes, source, plan, total):
                break
            activity.end_step()

    def _build_engine(self, draws_between: bool) -> StepEngine:
        prepared = self._prepared
        if prepared is None:
            raise StepError("run.steps came before run.prepare: prepare model and optimizer first")
        self._parts.step_end.watched = (prepared.modules, prepared.optimizers)
        engine = build_engine(
            self.setup,
            prepared,
            self._parts.log.steps,
            flags=self._parts.step_end.flags,
            on_batch=self._listeners.on_batch,
            after_update=self._listeners.updated,
            draws_between=draws_between or self._listeners.draws,
            reads_gradients=self._listeners.reads_gradients,
            reads_weights=self._listeners.reads_weights,
            watch=self._watch,
        )
        self._parts.log.follow(engine.update, engine.guard)
        return engine
