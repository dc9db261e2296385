"""A rank's part of a step as CUDA graphs: its lanes side by side, and what follows from their sum.

On one process all of it is one graph. On several it is two, before and after the exchange.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.data.batch import LaneBatch, Moment
from samestep.data.device import is_large
from samestep.errors import GraphError
from samestep.lanes.random_streams import MODEL, derive, seed_at
from samestep.optim.update import Updated
from samestep.reduce.gradients import Grads, RecordedSums
from samestep.reduce.stats import EMPTY, NO_FLAGS, LaneStats, LocalStats, RankFlags, ReplayedStats
from samestep.reduce.stats_ring import StepStatsRing
from samestep.step.capture import capture, drawing_from, has_drawn
from samestep.step.captured_constants import CapturedConstants
from samestep.step.cuda_streams import run_side_by_side
from samestep.step.engine import LossFunction, StepEngine
from samestep.step.graph_inputs import GraphInputs
from samestep.step.lane_passes import LanePasses
from samestep.step.loss_terms import TermSums, check_loss
from samestep.step.step_log import KEPT_STEPS, step_numbers

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 3e-2}
"""How far kernels that give other bits each time may be apart, as a part of the largest value."""


class RecordedLanes:
    """The forward and backward passes of a rank's lanes, and their sums, on batches at fixed places."""

    def __init__(self, engine: StepEngine, batches: Sequence[LaneBatch], loss: LossFunction, moment: Moment) -> None:
        device = engine.setup.context.device
        self._engine, self._loss = engine, loss
        self.is_large = any(is_large(batch.data) for batch in batches)
        """Whether batches should be on the device before they are copied to where lanes read them."""
        self.inputs = GraphInputs(batches, device)
        self.inputs.fill(batches)
        self._generators = {batch.lane: torch.Generator(device) for batch in batches}
        """Each lane draws from a state of its own: beside others, it could not share one."""
        self.drawn_from = self._generators
        """By lane, the generators of those that draw, as far as is known."""
        seed = engine.setup.config.seed
        self._roots = {batch.lane: derive(seed, MODEL, batch.lane) for batch in batches}
        self._batches = [
            _CapturedBatch(batch.lane, data, batch.ids, moment)
            for batch, data in zip(batches, self.inputs.data, strict=True)
        ]
        self._stats: dict[int, LaneStats] = {}
        self.sums = RecordedSums([], [])
        """What the last run left."""
        self._starts: list[Tensor | None] = []
        """What backpropagation started from; a graph reads it there at each replay."""
        self.lane_bytes = 0
        """What a lane's forward pass has left in memory for its backward pass."""

    def see_who_draws(self) -> None:
        """Leave out the generators of lanes that drew nothing: each costs a replay two kernels.

        A capture in which such a lane draws after all is refused by torch.
        """
        every = self._generators.items()
        self.drawn_from = {lane: generator for lane, generator in every if has_drawn(generator)}

    def seed(self, step: int) -> None:
        """Put every lane's generator at the start of its stream."""
        for lane, generator in self.drawn_from.items():
            generator.manual_seed(seed_at(self._roots[lane], step))

    def run(self, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """Run all lanes, and leave their sums where the ranks exchange them."""
        engine, held = self._engine, self._engine.setup.assignment.my_units
        self.forget()
        self._clear_grads()
        engine.begin_lanes()
        lanes = {batch.lane: partial(self._run_lane, batch) for batch in self._batches}
        blocks = run_side_by_side(lanes, held, streams)
        nothing: Grads = [None] * len(engine.params)
        stats = [self._stats.get(lane, EMPTY) for lane in held]
        self.sums = RecordedSums([grads or nothing for grads in blocks], stats)
        engine.reduction.gradients.record(self.sums)
        engine.reduction.buffers.record()

    def forget(self) -> None:
        """Let go of what the last run left."""
        self._stats, self.sums, self._starts = {}, RecordedSums([], []), []

    def sums_of_step(self) -> RecordedSums:
        """Return what the last replay left, with losses and counts that the next one leaves alone."""
        return RecordedSums(self.sums.blocks, [_copied(stats) for stats in self.sums.stats])

    def results(self) -> list[Tensor | None]:
        """Return the losses and gradients of the last run."""
        losses = [stats.loss for stats in self._stats.values() if isinstance(stats.loss, Tensor)]
        return [*losses, *(grad for grads in self.sums.blocks for grad in grads)]

    def _run_lane(self, batch: LaneBatch) -> Grads:
        engine, precision = self._engine, self._engine.setup.precision
        gradients, buffers = engine.reduction.gradients, engine.reduction.buffers
        before = torch.cuda.memory_allocated()
        torch.clear_autocast_cache()  # it holds casts of other lanes, on other streams
        with drawing_from(self._generators[batch.lane]), buffers.beside_others(batch.lane):
            with precision.forward():
                value, count = engine.terms.combine(self._loss(batch), len(batch))
            check_loss(value, count)
            self.lane_bytes = max(self.lane_bytes, torch.cuda.memory_allocated() - before)
            start = gradients.start(value, count)
            with precision.backward():
                value.backward(start)
        torch.clear_autocast_cache()
        self._starts.append(start)
        self._stats[batch.lane] = LaneStats(value.detach(), count)
        grads: Grads = [param.grad for param in engine.params]
        self._clear_grads()
        return grads

    def _clear_grads(self) -> None:
        for param in self._engine.params:
            param.grad = None


def _copied(stats: LaneStats) -> LaneStats:
    loss, count = (v.clone() if isinstance(v, Tensor) else v for v in stats.pair)
    return LaneStats(loss, count)


class _CapturedBatch(LaneBatch):
    """A batch that a loss is captured with: its lane, samples and step would stay for ever."""

    def __len__(self) -> int:
        return len(object.__getattribute__(self, "ids"))

    def __getattribute__(self, name: str) -> Any:
        if name in ("ids", "step", "epoch", "progress"):
            raise GraphError(f"the loss reads batch.{name}, which a replay would not follow")
        return object.__getattribute__(self, name)


class RecordedStep:
    """A step's graphs, and the memory they read and write."""

    def __init__(
        self,
        lanes: RecordedLanes,
        engine: StepEngine,
        of_loss: CapturedConstants,
        of_optimizers: CapturedConstants,
        streams: Sequence[torch.cuda.Stream],
        pool: Any,
        captures_update: bool,
    ) -> None:
        self._lanes, self._engine = lanes, engine
        self.of_loss, self.of_optimizers = of_loss, of_optimizers
        self.is_large = lanes.is_large
        self._captures_update = captures_update
        self._is_one = captures_update and engine.reduction.gradients.is_local
        self._update_graph: torch.cuda.CUDAGraph | None = None
        self._lane_count = engine.setup.batch.lane_count
        groups = sum(len(optimizer.param_groups) for optimizer in engine.optimizers)
        most = 2 * self._lane_count + groups + len(engine.setup.config.loss_weights or ()) + 2
        self._numbers = StepStatsRing(KEPT_STEPS, most, engine.setup.context.device)
        self._pool = pool

        def run() -> None:
            lanes.run(streams)
            if self._is_one:
                self._apply_update(self._exchange(NO_FLAGS))

        self._graph = capture(run, pool, lanes.drawn_from.values())
        if not engine.reduction.gradients.reads_recorded:
            lanes.sums = RecordedSums([], lanes.sums.stats)

    def replay(self, passes: LanePasses, batches: Sequence[LaneBatch]) -> None:
        """Run a step on these batches."""
        engine, step = self._engine, passes.data.index
        if not self._captures_update:
            stats = self.reduce(batches, step)
            rates = engine.update.begin(step)
            passes.changes_weights = True
            updated = engine.update.change(stats, rates)
            engine.update.end(step, stats, updated)
            passes.close(stats, updated, engine.terms.totals())
            return
        # With others, only after the exchange, as in an eager step: ranks report a skipped one together.
        rates = engine.update.begin(step) if self._is_one else ()
        self._lanes.inputs.fill(batches)
        self._lanes.seed(step)
        flags = engine.flags()
        if self._is_one:
            passes.changes_weights = True
        self._graph.replay()
        if not self._is_one:
            stats = self._exchange(flags)
            rates = engine.update.begin(step)
            passes.changes_weights = True
            if self._update_graph is None:
                self._update_graph = capture(lambda: self._apply_update(stats), self._pool)
            self._update_graph.replay()
        self._put_grads()
        replayed, updated = self._measured(rates, flags)
        engine.update.end(step, replayed, updated)
        passes.close(replayed, updated, self._totals)

    def reduce(self, batches: Sequence[LaneBatch], step: int) -> LocalStats:
        """Leave the mean over all lanes of all ranks in `.grad`."""
        self._lanes.inputs.fill(batches)
        self._lanes.seed(step)
        flags = self._engine.flags()
        self._graph.replay()
        stats = self._exchange(flags)
        self._finish(stats)
        return stats

    def _exchange(self, flags: RankFlags) -> LocalStats:
        """Exchange in the order of an eager step: another rank may be in one."""
        reduction = self._engine.reduction
        sums = self._lanes.sums if self._captures_update else self._lanes.sums_of_step()
        stats = reduction.gradients.share_recorded(sums, flags)
        reduction.buffers.start_recorded()
        reduction.gradients.exchange()
        reduction.buffers.wait()
        return stats

    def _finish(self, stats: LocalStats) -> None:
        self._engine.reduction.gradients.finish(stats)
        self._engine.reduction.buffers.finish()

    def _apply_update(self, stats: LocalStats) -> None:
        """Turn the sums of all ranks into the next weights."""
        engine = self._engine
        self._finish(stats)
        with self._capturable():
            self._updated = engine.update.change(stats, ())
        self._totals: TermSums | None = engine.terms.totals()
        self._stats = stats
        numbers = step_numbers(self._updated, self._totals, stats)
        self._numbers.write(numbers)
        self._grads = [param.grad for param in engine.params]

    def _measured(self, rates: tuple[float, ...], flags: RankFlags) -> tuple[ReplayedStats, Updated]:
        """Return what the replay measured, in memory that the next ones leave alone."""
        numbers = self._numbers.next_row()
        updated = replace(self._updated, rates=rates, numbers=numbers)
        if updated.skipped is not None:
            updated.skipped = numbers.measured[numbers.places.index(0)]
            if updated.scale is not None:
                updated.scale = numbers.measured[numbers.places.index(1)]
        return ReplayedStats(numbers.unread, 2 * self._lane_count, self._stats, flags), updated

    def _put_grads(self) -> None:
        """Put this step's gradients back, where eager steps have put others."""
        for param, grad in zip(self._engine.params, self._grads, strict=True):
            if param.grad is not grad:
                param.grad = grad

    @contextmanager
    def _capturable(self) -> Iterator[None]:
        """Fused optimizers are capturable anyway, but torch checks the flag."""
        groups = [g for o in self._engine.optimizers for g in o.param_groups if "capturable" in g]
        before = [group["capturable"] for group in groups]
        for group in groups:
            group["capturable"] = True
        try:
            yield
        finally:
            for group, flag in zip(groups, before, strict=True):
                group["capturable"] = flag


def refuse_other_numbers(lanes: RecordedLanes, eager: Sequence[Tensor | None], again: Callable[[], None]) -> None:
    """Raise if a replay gave other numbers than an eager run."""
    captured = lanes.results()
    if _equal(eager, captured):
        return
    again()  # which leaves the memory of the graph alone
    # Some kernels give other bits each time, which is not the capture's fault.
    varies = not _equal(eager, lanes.results())
    tolerance = _TOLERANCE[lanes._engine.setup.precision.dtype]
    if not (varies and _close(eager, captured, tolerance)):
        raise GraphError(
            "the captured loss gives other numbers than the eager one: does it change "
            "something in Python, or read what was not in the batch?"
        )


def host_generators() -> tuple[Any, ...]:
    """Return the states of the generators that a replay does not draw from."""
    return (
        random.getstate(),
        pickle.dumps(np.random.get_state()),
        torch.default_generator.get_state().numpy().tobytes(),
    )


def _equal(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and _same(a, b))
        for a, b in zip(left, right, strict=True)
    )


def _same(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=0.0, atol=0.0, equal_nan=True)


def _close(left: Sequence[Tensor | None], right: Sequence[Tensor | None], tolerance: float) -> bool:
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    for a, b in pairs:
        largest = float(a.nan_to_num(posinf=0.0, neginf=0.0).abs().max())
        if not torch.allclose(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
            return False
    return True
