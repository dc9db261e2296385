"""Steps of the engine whose batches are handed in one by one, as they come."""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor

from samestep.amp.config import AMPConfig
from samestep.data.batch import LaneBatch, StepData
from samestep.distributed.context import RunContext
from samestep.errors import TaskError
from samestep.lanes.plan import BatchPlan, LaneAssignment
from samestep.lanes.random_streams import RngStreams
from samestep.optim.precision import Precision
from samestep.pytree import tensors
from samestep.reduce.stats import RankFlags
from samestep.run_setup import RunSetup
from samestep.step.build_engine import build_engine, prepare
from samestep.step.lane_passes import LanePasses
from samestep.step.step_log import StepLog, StepRecord

Loss = Tensor | tuple[Tensor, Tensor | float]
"""A batch's mean loss, or its sum and what it was summed over."""


class FedSteps:
    """One batch is one lane; a step ends when every rank has had its accumulation of them."""

    def __init__(
        self, rules: AMPConfig, context: RunContext, precision: Precision, objects: Sequence[Any], accumulation: int
    ) -> None:
        ends = list(accumulate(context.gather(accumulation)))
        by_rank = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        config = rules.for_run(lanes=ends[-1])
        self.context, self._precision = context, precision
        self.name = context.broadcast(uuid.uuid4().hex)
        """The same on all ranks, and of no other trainer of the process group."""
        self.done = self.skipped = 0
        """Steps so far, and those of them that changed nothing."""
        self.norm: float | None = None
        """The gradient's, before it was last clipped."""
        self.has_more = self.any_rank_has_more = False
        """Whether this rank has batches after the open step; whether any rank had, at the last."""
        self._rng_state = _CallersRngState(context.device)
        setup = RunSetup(
            config=config,
            context=context,
            planned=BatchPlan(ends[-1], ends[-1]),
            assignment=LaneAssignment(tuple(by_rank), context.rank),
            rng=RngStreams(config.seed, context.device),
            precision=precision,
        )
        self._lane_count, self._my_lanes = ends[-1], by_rank[context.rank]
        self._prepared = prepare(setup, objects, restore=lambda *kinds: None)
        self.model = self._prepared.reduction.model
        """What forward passes call: the caller's model, or that in DistributedDataParallel."""
        self._needs_samples = self.model is not self._prepared.modules[0]
        self._step_log = StepLog(1, self._read, context.activity)
        # Between two batches the engine is inside a lane: autocast is entered here instead,
        # or it would stay on in the caller's own code.
        outside = Precision("fp32", "autocast is entered for each batch", context.device)
        self._engine = build_engine(
            replace(setup, precision=outside),
            self._prepared,
            self._step_log,
            flags=lambda: RankFlags(flag=float(self.has_more)),
        )
        self._step: LanePasses | None = None
        self._lanes: Iterator[LaneBatch]
        self._waiting: LaneBatch
        """The batch that the open step is to read next."""
        self.taken = 0
        """Batches that the open step has had; 0 between steps."""

    @property
    def scale(self) -> float | None:
        """The loss scale of the next step, if there is one."""
        scale = self._prepared.scaling.scale
        return None if scale is None else float(scale)

    def take(self, batch: Any, loss_of: Callable[[Any], Loss]) -> float:
        """Run a batch's lane, and with the last of them the step; gives the batch's mean loss.

        None, or a batch of no samples, leaves its lane empty and gives NaN. The caller's
        generators are left as they were.
        """
        samples = samples_in(batch)
        if not samples and self._needs_samples:
            raise TaskError(
                "a batch has no samples, and DistributedDataParallel would wait for its gradients: "
                'give every rank batches with samples, or set same="bits"'
            )
        with self._rng_state.set_aside():
            step = self._step or self._begin(samples)
            lane = self._my_lanes[self.taken]
            self._waiting = LaneBatch(lane, batch if samples else None, ("",) * samples)
            given = next(self._lanes)
            mean = self._backward(step, given, loss_of) if samples else None
            self.taken += 1
            if self.taken == len(self._my_lanes):
                self._finish(step)
            return math.nan if mean is None else float(mean)

    def _begin(self, samples: int) -> LanePasses:
        """Open a step, whose batches are not here yet; some may never be."""
        self.context.activity.begin_step(self.done)
        if self.done == 0:
            # Lane 0 is rank 0's first batch, however many ranks there are.
            first = self.context.broadcast(samples)
            if first:
                self._prepared.scaling.expect(first * self._lane_count)
        data = StepData(
            index=self.done,
            epoch=0,
            epoch_step=self.done,
            ends_epoch=False,
            units=tuple(self._my_lanes),
            ragged=False,
            read=lambda: self._waiting,
        )
        self._step = LanePasses(self._engine, data)
        self._lanes = self._step.lanes()
        return self._step

    def _backward(self, step: LanePasses, given: LaneBatch, loss_of: Callable[[Any], Loss]) -> Tensor:
        with self._precision.forward():
            loss = loss_of(given.data)
        loss_sum, count = loss if isinstance(loss, tuple) else (_as_sum(loss, len(given)), len(given))
        step.backward((loss_sum, count))
        return loss_sum.detach() / count

    def _finish(self, step: LanePasses) -> None:
        step.update()
        # All ranks at once: what is read later may be read by one of them alone.
        self._engine.update.sync_update()
        self._step_log.flush()
        self.context.activity.end_step()
        self.any_rank_has_more = any(rank.flag for rank in step.stats.flags()())
        self._step, self.taken = None, 0
        self.done += 1

    def _read(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self.skipped += record.skipped
            if isinstance(record.grad_norm, float) and not record.skipped:
                self.norm = record.grad_norm

    def refuse_bad_weights(self) -> None:
        """Before a save."""
        self._engine.guard.refuse_bad_weights(self.done, self._engine.params)

    def state_dict(self) -> dict[str, Any]:
        kept = {name: item.state_dict() for name, item in self._prepared.states().items()}
        return {"steps": self.done, "skipped steps": self.skipped, "kept": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.done, self.skipped = state["steps"], state["skipped steps"]
        for name, item in self._prepared.states().items():
            if name in state["kept"]:  # a training may resume in another precision
                item.load_state_dict(state["kept"][name])


def samples_in(batch: Any) -> int:
    """Return how many samples a batch has, by its first tensor; 0 for None."""
    if batch is None:
        return 0
    for tensor in tensors(batch):
        if tensor.dim() > 0:
            return len(tensor)
    raise TaskError(f"a batch of {type(batch).__name__} holds no tensor whose length is its number of samples")


def _as_sum(mean: Any, samples: int) -> Tensor:
    if not isinstance(mean, Tensor) or mean.dim() != 0:
        shape = tuple(mean.shape) if isinstance(mean, Tensor) else type(mean).__name__
        raise TaskError(
            f"the loss must be the batch's mean, a tensor of no dimensions, or a tuple of its sum "
            f"and count; it is {shape}"
        )
    # A sum in half precision would overflow where the mean does not.
    return (mean if mean.dtype == torch.float64 else mean.float()) * samples


class _CallersRngState:
    """Set aside while the trainer draws: what the caller draws continues where it was."""

    def __init__(self, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        self._numpy = np.random.MT19937()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        # Reading and setting numpy's state would take a hundred times as long as this exchange.
        python, numpy = random.getstate(), get_bit_generator()
        set_bit_generator(self._numpy)
        try:
            with torch.random.fork_rng(self._devices):
                yield
        finally:
            set_bit_generator(numpy)
            random.setstate(python)
