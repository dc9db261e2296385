"""One optimizer step over this rank's lanes: usable from a person's own loop.

    for batch in step.lanes:                       # this rank's lanes
        out = model(batch.x)
        step.backward(loss_sum(out, batch.y), count=len(batch.y))
    step.update(optimizer)                         # reduce, clip, step, schedule

or, with the loss as a function, which CUDA graphs and micro-batches need:

    step.train(lambda batch: (loss_sum(model(batch.x), batch.y), len(batch.y)))

`lanes` may be gone through more than once before a lane's `backward`: each pass gives the
lane the same batch, the same draws and the same buffers. That is what a loss over the whole
global batch needs: a first pass for all embeddings, a second for the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from samestep.data.batch import LaneBatch, Position, StepData
from samestep.data.device import DeviceCopies
from samestep.distributed.context import RunContext
from samestep.distributed.health.activity import DATA
from samestep.errors import StepError
from samestep.lanes.rng import BETWEEN, MODEL, Streams
from samestep.optim.nonfinite import FiniteGuard
from samestep.optim.precision import Precision
from samestep.optim.update import Update
from samestep.reduce.build import LaneReduction
from samestep.reduce.stats import EMPTY, LaneStats, LocalStats, RankFlags
from samestep.step.step_log import StepLog

LossFunction = Callable[[LaneBatch], tuple[Tensor, Tensor | float]]
"""Gives a batch's summed loss and what it was summed over."""


@dataclass
class StepEngine:
    """What all steps of a run share."""

    context: RunContext
    reduction: LaneReduction
    streams: Streams
    precision: Precision
    step_log: StepLog
    guard: FiniteGuard
    note: Callable[[], RankFlags]
    """What this rank tells all others with the step."""
    lanes: range
    """The lanes this rank runs one after the other."""
    params: Sequence[Parameter]
    frozen: Sequence[tuple[str, Parameter]]
    update: Update
    copies: DeviceCopies
    run_lane: Callable[[Step, LaneBatch, LossFunction], None]
    """How `Step.train` runs a lane: at once, in micro-batches, or as a CUDA graph."""
    try_first: Callable[[Step, LossFunction], None] | None = None
    """Called before a step's lanes."""
    draws_between: bool = True
    """Whether what a loop draws between its lanes and the next step is the same on all ranks."""
    needs_function: str = ""
    """The config's key that only `Step.train` can fulfil, if there is one."""
    on_batch: Callable[[int, LaneBatch], None] | None = None
    """Told of every batch as it is read."""


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
        self._on_device: dict[int, LaneBatch] = {}
        self._open: int | None = None
        self._lane_stats: dict[int, LaneStats] = {}
        self._stats: LocalStats | None = None
        self._by_function = False
        engine.guard.begin(data.index)
        engine.reduction.gradients.begin(data.ragged)
        engine.reduction.gradients.scaling.begin()
        engine.reduction.buffers.begin_step()

    def train(self, loss: LossFunction) -> None:
        """The whole step: every lane's loss and backward pass, then the update."""
        self._by_function = True
        if self._engine.try_first is not None:
            self._engine.try_first(self, loss)
        for position, lane in enumerate(self._data.lanes):
            self._engine.run_lane(self, self._enter(position, lane), loss)
        self._leave()
        self.update()

    @property
    def lanes(self) -> Iterator[LaneBatch]:
        """This rank's batches, one per lane that has samples.

        Between two of them everything random draws from the lane's own stream, and forward
        runs in the config's precision.
        """
        engine = self._engine
        if engine.needs_function and not self._by_function:
            raise StepError(
                f"{engine.needs_function} needs the loss as a function: write "
                "step.train(lambda batch: (loss_sum, count)) in place of the loop over step.lanes"
            )
        for position, lane in enumerate(self._data.lanes):
            batch = self.on_device(self._enter(position, lane))
            self.draw_from_lane()
            with self.sharing(), engine.precision.forward():
                yield batch
        self._leave()

    def _enter(self, position: int, lane: int) -> LaneBatch:
        """Begin a lane; gives its batch as it was read."""
        engine, batch = self._engine, self._batch(position)
        engine.reduction.buffers.enter_lane()
        self._open = lane
        return batch

    def draw_from_lane(self, on_device_only: bool = False) -> None:
        """Put the generators at the start of the open lane's stream.

        `on_device_only` is for a replay, in which nothing on the host draws.
        """
        assert self._open is not None, "a lane draws only while it is open"
        self._engine.streams.enter(
            MODEL, self._open, at=(self.index,), on_device_only=on_device_only
        )

    def _leave(self) -> None:
        self._open = None
        if self._engine.draws_between:
            # Else what is drawn there would depend on which lane was this rank's last.
            self._engine.streams.enter(BETWEEN, at=(self.index,))

    def sharing(self) -> AbstractContextManager[None]:
        """Around the open lane's forward pass: its gradients may leave for other ranks or not."""
        last = self._open == self._data.lanes[-1]
        return self._engine.reduction.gradients.forward_scope(last)

    def on_device(self, batch: LaneBatch) -> LaneBatch:
        """A lane's batch where the run computes."""
        found = self._on_device.get(batch.lane)
        if found is None:
            data = self._engine.copies.to_device(batch.data)
            found = self._on_device[batch.lane] = LaneBatch(batch.lane, data, batch.ids)
        return found

    def backward(self, loss_sum: Tensor, count: Tensor | float) -> None:
        """Backpropagate this lane's summed loss; `count` is what it was summed over."""
        _check_loss(loss_sum, count)
        self._backward(loss_sum, LaneStats(loss_sum.detach(), count))

    def backward_in_pieces(self, pieces: Sequence[LaneBatch], loss: LossFunction) -> None:
        """Backpropagate this lane micro-batch by micro-batch."""
        gradients, precision = self._engine.reduction.gradients, self._engine.precision
        total, counted = EMPTY.loss, EMPTY.count
        for piece in pieces[:-1]:
            # What leaves for other ranks during backward leaves with the last piece.
            with gradients.forward_scope(last=False):
                value, count = loss(piece)
            _check_loss(value, count)
            with precision.backward():
                value.backward(gradients.scaling.start)
            total, counted = total + value.detach(), counted + count
        value, count = loss(pieces[-1])
        _check_loss(value, count)
        self._backward(value, LaneStats(total + value.detach(), counted + count))

    def attempt(self, batch: LaneBatch, loss: LossFunction) -> None:
        """A forward and backward pass that tells nobody; whoever asked for it clears up."""
        gradients, precision = self._engine.reduction.gradients, self._engine.precision
        with gradients.forward_scope(last=False):
            value, _ = loss(batch)
        with precision.backward():
            value.backward(gradients.scaling.start)

    def _backward(self, loss: Tensor, stats: LaneStats) -> None:
        lane, last = self._leave_lane(stats)
        with self._engine.precision.backward():
            self._engine.reduction.gradients.backward(loss, stats.count, lane, last)

    def took_backward(self, stats: LaneStats, grads: Sequence[Tensor | None] | None) -> None:
        """Take the gradients of a backward pass that was run elsewhere, as in a CUDA graph.

        None if that has changed the weights by them already.
        """
        lane, last = self._leave_lane(stats)
        if grads is not None:
            for param, grad in zip(self._engine.params, grads, strict=True):
                param.grad = grad
            self._engine.reduction.gradients.take(lane, last)

    def _leave_lane(self, stats: LaneStats) -> tuple[int, bool]:
        """After the open lane's forward pass; whether it was this rank's last."""
        lane = self._require_open_lane()
        last = lane == self._data.lanes[-1]
        self._lane_stats[lane] = stats
        self._engine.reduction.buffers.leave_lane(lane)
        if last:
            self._share()
        return lane, last

    def update(self, *optimizers: Optimizer) -> None:
        """Sum over all lanes of all ranks, divide by the count, clip, step and schedule."""
        if self.updated:
            raise StepError(f"step {self.index} was already updated: call step.update once")
        engine = self._engine
        self._drain()
        stats = self._share()
        engine.reduction.gradients.finish(stats)
        engine.reduction.buffers.finish()
        self._check_frozen()
        updated = engine.update.apply(self.index, stats, optimizers)
        self.updated = True
        engine.step_log.add(self.index, self.epoch, stats, updated)

    @property
    def precision(self) -> Precision:
        return self._engine.precision

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
            self._stats = engine.reduction.gradients.share(rows, engine.note())
            engine.reduction.buffers.start()
        return self._stats

    def _batch(self, position: int) -> LaneBatch:
        while len(self._batches) <= position:
            activity = self._engine.context.activity
            before = activity.enter(DATA)
            read = self._data.read()
            activity.enter(before)
            self._engine.guard.saw(self.index, read)
            if self._engine.on_batch is not None:
                self._engine.on_batch(self.index, read)
            self._batches.append(read)
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


def run_at_once(step: Step, batch: LaneBatch, loss: LossFunction) -> None:
    """Run a lane as it is."""
    step.draw_from_lane()
    with step.sharing(), step.precision.forward():
        step.backward(*loss(step.on_device(batch)))


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
