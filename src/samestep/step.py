"""One optimizer step over this rank's lanes: usable from a person's own loop.

    for batch in step.lanes:                       # this rank's lanes
        out = model(batch.x)
        step.backward(loss_sum(out, batch.y), count=len(batch.y))
    step.update(optimizer)                         # reduce, clip, step, schedule

`lanes` may be gone through more than once before a lane's `backward`: each pass gives the
lane the same batch, the same draws and the same buffers. That is what a loss over the whole
global batch needs: a first pass for all embeddings, a second for the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.data import LaneBatch, Position, StepData, to_device
from samestep.errors import StepError
from samestep.ledger import Ledger
from samestep.nonfinite import FiniteGuard
from samestep.precision import Precision
from samestep.runtime.context import LaneMachinery, RunContext
from samestep.runtime.lanestats import EMPTY, LaneStats, LocalStats, RankNote
from samestep.runtime.pulse import DATA
from samestep.runtime.randomness import BETWEEN, MODEL, Streams


@dataclass
class StepEngine:
    """What all steps of a run share."""

    context: RunContext
    machinery: LaneMachinery
    streams: Streams
    precision: Precision
    ledger: Ledger
    guard: FiniteGuard
    note: Callable[[], RankNote]
    """What this rank tells all others with the step."""
    lanes: range
    """The lanes this rank runs one after the other."""
    params: Sequence[Parameter]
    frozen: Sequence[tuple[str, Parameter]]
    optimizers: Sequence[Optimizer]
    step_schedules: Sequence[LRScheduler]
    clip_norm: float | None
    on_batch: Callable[[int, LaneBatch], None] | None = None
    """Told of every batch as it is read."""
    after_update: Sequence[Callable[[], None]] = ()
    """Told of every update that was applied."""


class Step:
    """One optimizer step: a global batch, of which this rank drives some lanes."""

    def __init__(self, engine: StepEngine, data: StepData) -> None:
        self.index = data.index
        self.epoch = data.epoch
        self.epoch_step = data.epoch_step
        self.ends_epoch = data.ends_epoch
        self.updated = False
        self._engine = engine
        self._data = data
        self._batches: list[LaneBatch] = []
        self._open: int | None = None
        self._lane_stats: dict[int, LaneStats] = {}
        self._stats: LocalStats | None = None
        engine.guard.begin(data.index)
        engine.machinery.gradients.begin(data.ragged)
        engine.machinery.buffers.begin_step()

    @property
    def lanes(self) -> Iterator[LaneBatch]:
        """This rank's batches, one per lane that has samples.

        Between two of them everything random draws from the lane's own stream, and forward
        runs in the config's precision.
        """
        engine = self._engine
        for position, lane in enumerate(self._data.lanes):
            batch = self._batch(position)
            last = lane == self._data.lanes[-1]
            engine.machinery.buffers.enter_lane()
            engine.streams.enter(MODEL, lane, at=(self.index,))
            self._open = lane
            with engine.machinery.gradients.forward_scope(last), engine.precision.forward():
                yield batch
        self._open = None
        # Else what is drawn between steps would depend on which lane was this rank's last.
        engine.streams.enter(BETWEEN, at=(self.index,))

    def backward(self, loss_sum: Tensor, count: Tensor | float) -> None:
        """Backpropagate this lane's summed loss; `count` is what it was summed over."""
        lane = self._require_open_lane()
        _check_loss(loss_sum, count)
        engine, last = self._engine, lane == self._data.lanes[-1]
        self._lane_stats[lane] = LaneStats(loss_sum.detach(), count)
        engine.machinery.buffers.leave_lane(lane)
        if last:
            self._share()
        with engine.precision.backward():
            engine.machinery.gradients.backward(loss_sum, count, lane, last)

    def update(self, *optimizers: Optimizer) -> None:
        """Sum over all lanes of all ranks, divide by the count, clip, step and schedule."""
        if self.updated:
            raise StepError(f"step {self.index} was already updated: call step.update once")
        engine = self._engine
        self._drain()
        stats = self._share()
        engine.machinery.gradients.finish(stats)
        engine.machinery.buffers.finish()
        self._check_frozen()
        allowed = engine.guard.allows_update(self.index, stats, engine.params)
        norm = None
        if engine.clip_norm is not None and allowed:
            norm = clip_grad_norm_(engine.params, engine.clip_norm)
        rates = [group["lr"] for opt in engine.optimizers for group in opt.param_groups]
        if allowed:
            for optimizer in optimizers or engine.optimizers:
                optimizer.step()
            for schedule in engine.step_schedules:
                schedule.step()
            for listener in engine.after_update:
                listener()
        self.updated = True
        engine.ledger.add(self.index, self.epoch, stats, rates, norm, skipped=not allowed)

    @property
    def stats(self) -> LocalStats:
        """What all lanes of all ranks measured, and what each rank wants."""
        return self._share()

    def refuse_bad_weights(self) -> None:
        """Before this step is saved; waits for the device, as a save does."""
        self._engine.guard.refuse_bad_weights(self.index, self._engine.params)

    @property
    def following(self) -> Position:
        """Where the run stands after this step."""
        return self._data.following

    def _share(self) -> LocalStats:
        """Start telling all ranks what this rank's lanes counted, and changed in buffers.

        Before the last backward pass, so that both travel behind it; every rank starts its
        collectives in this order.
        """
        if self._stats is None:
            engine = self._engine
            rows = [self._lane_stats.get(lane, EMPTY) for lane in engine.lanes]
            self._stats = engine.machinery.gradients.share(rows, engine.note())
            engine.machinery.buffers.start()
        return self._stats

    def _batch(self, position: int) -> LaneBatch:
        while len(self._batches) <= position:
            pulse = self._engine.context.pulse
            before = pulse.enter(DATA)
            read = self._data.read()
            pulse.enter(before)
            self._engine.guard.saw(self.index, read)
            if self._engine.on_batch is not None:
                self._engine.on_batch(self.index, read)
            data = to_device(read.data, self._engine.context.device)
            self._batches.append(LaneBatch(read.lane, data, read.ids))
        return self._batches[position]

    def _drain(self) -> None:
        """Read what the loop did not ask for, so that the next step gets its own batches."""
        if self._data.lanes:
            self._batch(len(self._data.lanes) - 1)
        self._open = None

    def _require_open_lane(self) -> int:
        if self._open is None:
            raise StepError(
                "step.backward belongs inside 'for batch in step.lanes', once for each batch"
            )
        if self._open in self._lane_stats:
            raise StepError(
                f"step.backward was called twice for lane {self._open}: add the losses up and "
                "call it once"
            )
        return self._open

    def _check_frozen(self) -> None:
        for name, param in self._engine.frozen:
            if param.grad is not None:
                raise StepError(
                    f"parameter {name} was frozen when the run was prepared and now has a "
                    "gradient, which no other rank would get. Unfreeze it before run.prepare"
                )


def _check_loss(loss_sum: Tensor, count: Tensor | float) -> None:
    if not isinstance(loss_sum, Tensor) or loss_sum.dim() != 0:
        shape = tuple(loss_sum.shape) if isinstance(loss_sum, Tensor) else type(loss_sum).__name__
        raise StepError(
            f"the loss must be a sum over the lane's samples, a tensor of no dimensions, "
            f"not {shape}: use reduction='sum'"
        )
    if not loss_sum.requires_grad:
        raise StepError("the loss does not depend on any parameter that requires a gradient")
    if not isinstance(count, Tensor) and not count >= 0:
        raise StepError(f"count is {count}: it is how many things the loss was summed over")
    if isinstance(count, Tensor) and (count.dim() != 0 or count.requires_grad):
        raise StepError("count must be a number or a tensor of no dimensions without gradient")


def trainable(
    optimizers: Sequence[Optimizer], modules: Sequence[torch.nn.Module]
) -> tuple[list[tuple[str, Parameter]], list[tuple[str, Parameter]]]:
    """The optimizers' parameters by name: those that train, and those that are frozen."""
    names = {id(p): name for module in modules for name, p in module.named_parameters()}
    seen: dict[int, tuple[str, Parameter]] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                name = names.get(id(param), f"optimizer {number} parameter {index}")
                seen.setdefault(id(param), (name, param))
    every = list(seen.values())
    return [p for p in every if p[1].requires_grad], [p for p in every if not p[1].requires_grad]
