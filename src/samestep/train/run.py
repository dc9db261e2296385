"""A run: what a person's own loop, and ours, is written on.

with samestep.start("config.yaml") as run:
    model, optimizer = run.prepare(model, optimizer)
    for step in run.steps(dataset):
        for batch in step.lanes:
            step.backward(loss_sum(model(batch.x), batch.y), count=len(batch.y))
        step.update(optimizer)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from samestep.checkpoint.state import Stateful
from samestep.config import Config, load_config
from samestep.data.batch import Collate, LaneBatch, Lanes, Source
from samestep.data.factory import open_source
from samestep.data.map_style import MapSource
from samestep.data.orders import Order
from samestep.distributed.context import RunContext, create_run_context
from samestep.distributed.hardware import detect_hardware
from samestep.distributed.health.activity import EVALUATE
from samestep.errors import StepError
from samestep.lanes.plan import deal_lanes
from samestep.lanes.rng import BETWEEN, INIT, Streams
from samestep.optim.lr_scaling import describe_scaling, lr_factor
from samestep.optim.precision import choose_precision
from samestep.step.engine import Prepared, build_engine, prepare
from samestep.step.micro_batches import out_of_memory
from samestep.step.step import Step, StepEngine
from samestep.step.step_log import StepLog, StepRecord
from samestep.train.batchnorm import Forward, measure_batchnorm
from samestep.train.evaluate import Evaluator, Measure, Values
from samestep.train.open_run import open_run
from samestep.train.plan_report import announce
from samestep.train.saver import Saver
from samestep.train.step_end import StepEnd
from samestep.train.step_times import StepTimes
from samestep.train.trackers import open_trackers

if TYPE_CHECKING:
    from torchmetrics import Metric


def start(config: Config | str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Run:
    """Open a run on this process: a single process, or a rank of whatever launched it."""
    if not isinstance(config, Config):
        config = load_config(config, overrides)
    context = create_run_context(config, detect_hardware())
    try:
        return Run(config, context)
    except BaseException:
        context.__exit__(*sys.exc_info())
        raise


class Run:
    """One run on this process: prepares objects, gives steps, evaluates, saves and logs."""

    def __init__(self, config: Config, context: RunContext) -> None:
        self.config = config
        self.context = context
        self.folder = config.run_path
        self.batch = config.batch_plan(context.world)
        assignment = deal_lanes(self.batch.lanes, context.world, config.distributed.lane_weights)
        self.lanes = Lanes(tuple(assignment), context.rank, fused=config.same == "samples")
        self.on_record: list[Callable[[StepRecord], None]] = []
        """Called on every rank with each step's record, when it is read."""
        self.on_batch: Callable[[int, LaneBatch], None] | None = None
        """Called with the step and each of this rank's batches, when it is read."""
        self._streams = Streams(config.seed, context.device)
        self._precision = choose_precision(config.precision, context.device)
        self._precision.switch_on(same_bits=config.same == "bits")
        self._prepared: Prepared | None = None
        self._engine: StepEngine | None = None
        self.draws_between = True
        """False in a loop that draws nothing between steps: that spares two seedings a step."""
        self.after_update: list[Callable[[], None]] = []
        """Called after every update that changed the weights."""
        self._current: Step | None = None
        with ExitStack() as opening:
            self._opened = open_run(config, context, self.batch)
            if self._opened.folder is not None:
                opening.callback(self._opened.folder.close)
            self._saver = Saver(config, context, self.folder, self._opened.point)
            self.start_step = self._saver.position.step
            """The first step of this process's part of the run; 0 unless it was resumed."""
            self._trackers = open_trackers(config, self.folder, context.is_main, self.start_step)
            opening.pop_all()
        context.before_end(self._saver.finish_write)
        context.activity.timed_every = min(context.activity.timed_every, config.log_every)
        self._times = StepTimes(context.activity, context.device)
        self._step_log = StepLog(config.log_every, self._write_records, context.activity)
        self._step_end = StepEnd(self._saver, self._times, context, config)
        self._streams.enter(INIT)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        meant = self._with_advice(error)
        # The others are told first: what is still to be written may take long.
        meant = meant if meant is None else self.context.failed(meant)
        with ExitStack() as closing:
            closing.callback(self.context.close)
            if self._opened.folder is not None:
                closing.callback(self._opened.folder.close)
            closing.callback(self._saver.close)
            closing.callback(self._trackers.close)
            if error is None:
                closing.callback(self.flush)
        if meant is not error and meant is not None:
            raise meant from error

    def _with_advice(self, error: BaseException | None) -> BaseException | None:
        if not isinstance(error, torch.OutOfMemoryError):
            return error
        at = "before the first step" if self._current is None else f"in step {self._current.index}"
        return out_of_memory(error, self.context.device, self.batch.lane_batch, at)

    # -- what is measured ------------------------------------------------------------------

    def _write_records(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            if record.bad_lanes and self._prepared is not None and not record.skipped:
                self._prepared.guard.stop(record.step, record.bad_lanes)
            self._trackers.write(record.values())
            for listener in self.on_record:
                listener(record)
        seconds = records[-1].seconds
        row = self._times.row(len(records), seconds, self.batch.global_batch)
        self._trackers.write({"step": records[-1].step, **row})
        self._trackers.flush()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write values to the trackers, once for the run. Call it on every rank or on any."""
        self._trackers.write({"step": step, **values})

    def flush(self) -> None:
        """Read every loss that is still on the device, and write it."""
        self.sync_update()
        self._step_log.flush()
        self._trackers.flush()

    def sync_update(self) -> None:
        """Let schedules and averages have followed the last update, should it still be unknown
        whether it changed the weights."""
        if self._engine is not None:
            self._engine.update.sync_update()

    # -- preparing -------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """Take modules, optimizers and per-step schedules into the run; gives them back.

        The first module is the model; at `same: rounding` and `samples` it comes back
        wrapped in DistributedDataParallel. All weights become rank 0's. In a run that goes
        on, they get the state that they had.
        """
        if self._prepared is not None:
            raise StepError("run.prepare was called twice: give it everything at once")
        self._prepared = prepared = prepare(
            self.config,
            self.context,
            self._precision,
            objects,
            self.lanes.units,
            self.batch,
            self._saver.prepare,
        )
        for name, item in prepared.states().items():
            self._saver.keep(name, item)
        model = prepared.modules[0]
        wrapped = [prepared.reduction.model if item is model else item for item in objects]
        return wrapped[0] if len(wrapped) == 1 else tuple(wrapped)

    def prepare_once(self, prepare: Callable[[], None]) -> None:
        """Call it on one rank of each node before the others go on; its draws change nothing."""
        with self.context.rank0_first() as first:
            if first:
                prepare()
        self._streams.enter(INIT)

    def scaled_lr(self, lr: float) -> float:
        """A learning rate for this run's global batch, by `lr_scaling` against `base_batch`."""
        scaled = describe_scaling(self.config, self.batch.global_batch)
        if scaled is not None:
            self.context.log.main(scaled)
        return lr * lr_factor(self.config, self.batch.global_batch)

    def keep(self, name: str, item: Stateful) -> None:
        """Let an object's state be saved with the run; in a run that goes on it gets it back.

        It needs `state_dict()` and `load_state_dict()`, and a state that is the same on all
        ranks.
        """
        self._saver.keep(name, item)

    # -- training --------------------------------------------------------------------------

    def source(
        self, dataset: Any, order: Order | None = None, collate: Collate | None = None
    ) -> Source:
        """The steps' data: of a dataset with a length, or of lane streams."""
        digest = self.on_batch is not None
        return open_source(
            self.config, self.context, self.lanes, dataset, order, collate, digest=digest
        )

    def total_steps(self, source: Source) -> int | None:
        """How many steps the run has; None if that shows only at the data's end."""
        if self.config.steps is not None:
            return self.config.steps
        assert self.config.epochs is not None, "checked when the config was loaded"
        if isinstance(source, MapSource):
            return source.plan.steps * self.config.epochs
        return self.config.steps_per_epoch and self.config.steps_per_epoch * self.config.epochs

    def steps(
        self, dataset: Any, order: Order | None = None, collate: Collate | None = None
    ) -> Iterator[Step]:
        """The run's steps over a dataset, or over a `source` made before.

        A run that goes on gives the steps that are left. When one is over it is saved if it
        is due, and the run stops here if a signal asked it to.
        """
        source = dataset if isinstance(dataset, Source) else self.source(dataset, order, collate)
        engine = self._engine = self._build_engine()
        total = self.total_steps(source)
        plan = announce(
            self.config,
            self.context,
            self.lanes,
            source,
            total,
            self._precision,
            self._opened.point,
        )
        position, activity = self._saver.position, self.context.activity
        self._saver.refuse_what_is_left()
        if self._step_end.is_over(position, total):
            why = "" if self._saver.ended in (None, "done") else f", stopped by {self._saver.ended}"
            done = f"The run is complete: {position.step} steps{why}. Nothing to train"
            self.context.log.main(done)
            return
        self._step_log.restart_clock()
        with self._step_end.signals:
            for data in source.steps(position, total):
                activity.begin_step(data.index)
                step = self._current = Step(engine, data)
                if engine.draws_between:
                    # A place of its own, so that a run that goes on here draws as this one does.
                    self._streams.enter(BETWEEN, at=(data.index, 1))
                yield step
                if not step.updated:
                    raise StepError(f"step {step.index} was left without step.update: call it once")
                self._current = None
                if self._step_end.end(step, source, plan, total, self.flush):
                    break
                activity.end_step()
        self.flush()
        self._saver.wait()

    def save(self, metrics: Mapping[str, Any] | None = None, *, best: bool = False) -> None:
        """Remember the metrics of an evaluation; `best` saves these weights as the best so far.

        The save happens when the step is over. Call it on every rank.
        """
        if self._current is None:
            raise StepError("run.save belongs inside 'for step in run.steps(...)'")
        self._saver.ask(self._current.index + 1, metrics or {}, best)

    def stop(self, reason: str) -> None:
        """Let this step be the run's last one. Call it on every rank."""
        self._step_end.stop_reason = reason

    def ends_with(self, step: Step, total: int | None) -> bool:
        """Whether the run is over with this step, of so many if that is known."""
        return self._step_end.why_over(step, total) is not None

    def pause_after(self, steps: int) -> None:
        """Save and stop after so many steps, as if a signal had asked for it."""
        self._step_end.pause_after = steps

    def _build_engine(self) -> StepEngine:
        if self._prepared is None:
            raise StepError("run.steps came before run.prepare: prepare model and optimizer first")
        self._step_end.watch(self._prepared.modules, self._prepared.optimizers)
        engine = build_engine(
            self.config,
            self.context,
            self._precision,
            self._streams,
            self._step_log,
            self._prepared,
            self.after_update,
            self._step_end.note,
            self.lanes.mine,
            self.on_batch,
        )
        engine.draws_between = self.draws_between
        return engine

    # -- evaluating ------------------------------------------------------------------------

    def evaluate(
        self,
        dataset: Any,
        measure: Measure,
        metrics: Mapping[str, Metric] | None = None,
        collate: Collate | None = None,
        step: int = 0,
    ) -> Values:
        """Measure the model on a dataset: each sample once, the same result on every rank.

        `measure(model, batch, metrics)` updates the metrics and returns the loss as (sum,
        count). It gets the unwrapped model.
        """
        if self._prepared is None:
            raise StepError("run.evaluate came before run.prepare: prepare the model first")
        evaluator = Evaluator(
            self.config,
            self.context,
            self.batch,
            self.lanes.assignment,
            self._streams,
        )
        self.flush()
        with self.context.activity.during(EVALUATE):
            values = evaluator.run(
                self._prepared.modules[0], dataset, measure, metrics or {}, collate, step
            )
        self._streams.enter(BETWEEN, at=(step,))
        self._step_log.restart_clock()
        if any(isinstance(value, float) and math.isnan(value) for value in values.values()):
            self.context.log.warn(f"evaluation at step {step} gave NaN: {values}")
        return values

    def measure_batchnorm(
        self,
        dataset: Any,
        forward: Forward,
        order: Order | None = None,
        collate: Collate | None = None,
    ) -> bool:
        """Measure the statistics of the model's BatchNorm anew over the training set.

        `forward(model, batch)` puts a batch through the model. False if it has no BatchNorm.
        """
        with self.context.activity.during(EVALUATE):
            found = measure_batchnorm(
                self.model, forward, dataset, order, collate,
                self.config, self.context, self.lanes, self._streams,
            )  # fmt: skip
        self._streams.enter(BETWEEN)
        self._step_log.restart_clock()
        return found

    @property
    def model(self) -> nn.Module:
        """The prepared model, unwrapped."""
        if self._prepared is None:
            raise StepError("there is no model yet: call run.prepare first")
        return self._prepared.modules[0]
