"""A run: what a person's own loop, and ours, is written on.

with samestep.start("config.yaml") as run:
    model, optimizer = run.prepare(model, optimizer)
    for step in run.steps(dataset):
        for batch in step.lanes:
            step.backward(loss_sum(model(batch.x), batch.y), count=len(batch.y))
        step.update(optimizer)
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.batchnorm import Forward, measure_batchnorm
from samestep.boundary import Boundary
from samestep.checkpoint.resume import refuse_another_run, warn_of_other_bits
from samestep.checkpoint.state import Stateful
from samestep.config import Config, load_config
from samestep.data import Collate, LaneBatch, Lanes, MapSource, Source
from samestep.errors import StepError, TaskError
from samestep.evaluation import Evaluator, Measure, Values
from samestep.ledger import Ledger, StepRecord
from samestep.nonfinite import FiniteGuard
from samestep.opening import open_run
from samestep.orders import Order
from samestep.plan import deal_lanes
from samestep.precision import Precision
from samestep.runtime.context import LaneMachinery, RunContext, create_run_context
from samestep.runtime.hardware import detect_hardware
from samestep.runtime.pulse import EVALUATE
from samestep.runtime.randomness import BETWEEN, INIT, Streams
from samestep.saving import Saver
from samestep.sources import open_source, pins_memory
from samestep.step import Step, StepEngine, trainable
from samestep.timing import StepTimes
from samestep.trackers import open_trackers

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


@dataclass(frozen=True)
class _Prepared:
    modules: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    schedules: Sequence[LRScheduler]
    machinery: LaneMachinery


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
        self.after_update: list[Callable[[], None]] = []
        """Called after every update of the weights that was applied, and its schedules."""
        self._streams = Streams(config.seed, context.device)
        self._prepared: _Prepared | None = None
        self._guard: FiniteGuard | None = None
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
        context.pulse.timed_every = min(context.pulse.timed_every, config.log_every)
        self._times = StepTimes(context.pulse, context.device)
        self._ledger = Ledger(config.log_every, self._write_records, context.pulse)
        self._boundary = Boundary(self._saver, self._times, context, config)
        self._streams.enter(INIT)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # The others are told first: what is still to be written may take long.
        meant = error if error is None else self.context.failed(error)
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

    # -- what is measured ------------------------------------------------------------------

    def _write_records(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            if record.bad_lanes and self._guard is not None and not record.skipped:
                self._guard.stop(record.step, record.bad_lanes)
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
        self._ledger.flush()
        self._trackers.flush()

    # -- preparing -------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """Take modules, optimizers and per-step schedules into the run; gives them back.

        The first module is the model; at `same: rounding` and `samples` it comes back
        wrapped in DistributedDataParallel. All weights become rank 0's. In a run that goes
        on, they get the state that they had.
        """
        if self._prepared is not None:
            raise StepError("run.prepare was called twice: give it everything at once")
        modules = [item for item in objects if isinstance(item, nn.Module)]
        optimizers = [item for item in objects if isinstance(item, Optimizer)]
        schedules = [item for item in objects if isinstance(item, LRScheduler)]
        if len(modules) + len(optimizers) + len(schedules) != len(objects):
            raise TaskError("run.prepare takes modules, optimizers and learning-rate schedulers")
        if not modules or not optimizers:
            raise TaskError("run.prepare needs a model and an optimizer")
        for module in modules:
            module.to(self.context.device)
        params, _ = trainable(optimizers, modules)
        if not params:
            raise TaskError("no parameter of the optimizers requires a gradient")
        self._saver.prepare(modules, optimizers, schedules)
        machinery = self.context.machinery(self.config, modules, params, self.lanes.units)
        self._prepared = _Prepared(modules, optimizers, schedules, machinery)
        self._guard = FiniteGuard(
            self.config.on_nonfinite, self.context, modules, self.config.log_every + 1
        )
        if self._guard.skips:
            self._saver.keep("skipped steps", self._guard)
        wrapped = [machinery.model if item is modules[0] else item for item in objects]
        return wrapped[0] if len(wrapped) == 1 else tuple(wrapped)

    def prepare_once(self, prepare: Callable[[], None]) -> None:
        """Call it on one rank of each node before the others go on; its draws change nothing."""
        with self.context.rank0_first() as first:
            if first:
                prepare()
        self._streams.enter(INIT)

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
        engine = self._engine()
        total = self.total_steps(source)
        plan = self._announce(source, total)
        position, pulse = self._saver.position, self.context.pulse
        self._saver.refuse_what_is_left()
        if self._boundary.is_over(position, total):
            why = "" if self._saver.ended in (None, "done") else f", stopped by {self._saver.ended}"
            done = f"The run is complete: {position.step} steps{why}. Nothing to train"
            self.context.log.main(done)
            return
        self._ledger.restart_clock()
        with self._boundary.signals:
            for data in source.steps(position, total):
                pulse.begin_step(data.index)
                step = self._current = Step(engine, data)
                # A place of its own, so that a run that goes on here draws as this one does.
                self._streams.enter(BETWEEN, at=(data.index, 1))
                yield step
                if not step.updated:
                    raise StepError(f"step {step.index} was left without step.update: call it once")
                self._current = None
                if self._boundary.end(step, source, plan, total, self.flush):
                    break
                pulse.end_step()
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
        self._boundary.stop_reason = reason

    def ends_with(self, step: Step, total: int | None) -> bool:
        """Whether the run is over with this step, of so many if that is known."""
        return self._boundary.why_over(step, total) is not None

    def pause_after(self, steps: int) -> None:
        """Save and stop after so many steps, as if a signal had asked for it."""
        self._boundary.pause_after = steps

    def _engine(self) -> StepEngine:
        if self._prepared is None or self._guard is None:
            raise StepError("run.steps came before run.prepare: prepare model and optimizer first")
        prepared, context = self._prepared, self.context
        params, frozen = trainable(prepared.optimizers, prepared.modules)
        self._boundary.watch(prepared.modules, prepared.optimizers)
        return StepEngine(
            context=context,
            machinery=prepared.machinery,
            streams=self._streams,
            precision=Precision(self.config, context.device),
            ledger=self._ledger,
            guard=self._guard,
            note=self._boundary.note,
            lanes=self.lanes.mine,
            params=[param for _, param in params],
            frozen=frozen,
            optimizers=prepared.optimizers,
            step_schedules=prepared.schedules,
            clip_norm=self.config.clip.norm,
            on_batch=self.on_batch,
            after_update=self.after_update,
        )

    def _announce(self, source: Source, total: int | None) -> dict[str, Any]:
        """Print and store how samples become steps, lanes and ranks."""
        shares = [len(lanes) for lanes in self.lanes.assignment]
        plan = {
            "same": self.config.same,
            "global_batch": self.batch.global_batch,
            "lanes": self.batch.lanes,
            "lane_batch": self.batch.lane_batch,
            "world": self.context.world,
            "lanes_per_rank": shares,
            "samples": source.plan.samples if isinstance(source, MapSource) else None,
            "steps": total,
            "device": self.context.device.type,
            "threads_per_rank": torch.get_num_threads(),
        }
        if self._opened.point is not None:
            refuse_another_run(self.config, plan, self._opened.point)
            warn_of_other_bits(plan, self._opened.point, self.context.log.main)
        if self.context.is_main:
            (self.folder / "plan.json").write_text(json.dumps(plan, indent=2), encoding="utf-8")
        of_samples = f"{plan['samples']} samples, " if plan["samples"] else ""
        self.context.log.main(
            f"Plan: {of_samples}global batch {self.batch.global_batch} = {self.batch.lanes} lanes "
            f"x {self.batch.lane_batch}; {self.context.world} rank(s) drive "
            f"{'+'.join(map(str, shares))} lanes; {total or 'unknown'} steps; "
            f"same: {self.config.same}"
        )
        if self.config.batch_per_rank is not None:
            self.context.log.main(
                f"batch_per_rank {self.config.batch_per_rank} makes this run depend on its "
                f"{self.context.world} rank(s): another number of ranks is another run"
            )
        return plan

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
            pins_memory(self.config, self.context),
        )
        self._ledger.flush()
        with self.context.pulse.during(EVALUATE):
            values = evaluator.run(
                self._prepared.modules[0], dataset, measure, metrics or {}, collate, step
            )
        self._streams.enter(BETWEEN, at=(step,))
        self._ledger.restart_clock()
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
        with self.context.pulse.during(EVALUATE):
            found = measure_batchnorm(
                self.model, forward, dataset, order, collate,
                self.config, self.context, self.lanes, self._streams,
            )  # fmt: skip
        self._streams.enter(BETWEEN)
        self._ledger.restart_clock()
        return found

    @property
    def model(self) -> nn.Module:
        """The prepared model, unwrapped."""
        if self._prepared is None:
            raise StepError("there is no model yet: call run.prepare first")
        return self._prepared.modules[0]
