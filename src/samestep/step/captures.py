"""What is captured as a CUDA graph: a lane's passes, the update, or both as one.

Each is captured with the memory it reads and writes, and gives the same bits as the eager code.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from samestep.data.batch import LaneBatch
from samestep.errors import GraphError
from samestep.optim.device_lr import DeviceRates
from samestep.optim.precision import Precision
from samestep.optim.update import Change
from samestep.pytree import clone, leaves
from samestep.reduce.buffer_slots import find_slots
from samestep.reduce.gradients import GradientSum, Grads
from samestep.reduce.stats import LaneStats
from samestep.step.lane_passes import LossFunction
from samestep.step.loss_terms import LossTerms

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 3e-2}
"""How far kernels that give other bits each time may be apart, as a part of the largest value."""
_READ_EACH_TIME = ("params", "lr", "initial_lr")
"""What of an optimizer's group a capture does not hold as it was."""


@dataclass(frozen=True)
class GraphParts:
    """What of a run its graphs are captured from."""

    gradients: GradientSum
    precision: Precision
    params: Sequence[Parameter]
    modules: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    rates: DeviceRates
    terms: LossTerms


class LaneGraph:
    """The forward and backward pass of batches of one shape."""

    def __init__(
        self,
        parts: GraphParts,
        batch: LaneBatch,
        loss: LossFunction,
        pool: Any,
        generator: torch.Generator,
    ) -> None:
        self._parts, self._params = parts, parts.params
        self._loss_function = loss
        self.grads: Grads = []
        data = clone(batch.data)
        self._batch = _CapturedBatch(batch.lane, data, batch.ids, batch.moment)
        self._inputs = list(leaves(data))
        seed = generator.initial_seed()
        slots = find_slots(parts.modules)
        buffers = [slot.tensor for slot in slots]
        eager = self._pass()
        for slot, buffer in zip(slots, buffers, strict=True):
            if slot.tensor is not buffer:
                raise GraphError(
                    f"the loss puts another tensor in the place of buffer {slot.path}, which a replay "
                    "would not: change it in place, such as with copy_ or lerp_"
                )
        self.clear()
        host_draws = _host_generators()
        self._graph = torch.cuda.CUDAGraph()
        generator.manual_seed(seed)
        with torch.cuda.graph(self._graph, pool=pool):
            self._loss, self._count = self.run()
        self.take_grads()
        if host_draws != _host_generators():
            raise GraphError("the loss draws random numbers on the host, which a replay does not")
        generator.manual_seed(seed)
        self._graph.replay()
        captured = [self._loss, *self.grads]
        if not _equal(eager, captured):
            generator.manual_seed(seed)
            # Some kernels give other bits each time, which is not the capture's fault.
            varies = not _equal(eager, self._pass())
            if not (varies and _close(eager, captured, _TOLERANCE[parts.precision.dtype])):
                raise GraphError(
                    "the captured loss gives other numbers than the eager one: does it change "
                    "something in Python, or read what was not in the batch?"
                )

    def run(self) -> tuple[Tensor, Tensor | float]:
        """The forward and backward pass; gives the loss and its count."""
        parts = self._parts
        torch.clear_autocast_cache()  # it holds casts from outside the capture
        with parts.precision.forward():
            value, count = parts.terms.combine(self._loss_function(self._batch))
        with parts.precision.backward():
            self._start = parts.gradients.start(value, count)
            value.backward(self._start)
        torch.clear_autocast_cache()
        return value.detach(), count

    def _pass(self) -> list[Tensor | None]:
        """An eager pass; its loss and gradients."""
        self.clear()
        value, _ = self.run()
        return [value, *(param.grad for param in self._params)]

    def clear(self) -> None:
        for param in self._params:
            param.grad = None

    def take_grads(self) -> Grads:
        """From now on the gradients lie where the last capture has put them."""
        self.grads = [param.grad for param in self._params]
        return self.grads

    def refill(self, values: Sequence[Any]) -> None:
        """Put what a batch of this shape holds where the capture reads it."""
        for place, value in zip(self._inputs, values, strict=True):
            if isinstance(place, Tensor):
                place.copy_(value, non_blocking=True)

    def replay(self, values: Sequence[Any]) -> LaneStats:
        self.refill(values)
        self._graph.replay()
        return _copied(self._loss, self._count)


class _CapturedBatch(LaneBatch):
    """A batch that a loss is captured with: its lane, samples and step would stay for ever."""

    def __len__(self) -> int:
        return len(object.__getattribute__(self, "ids"))

    def __getattribute__(self, name: str) -> Any:
        if name in ("lane", "ids", "step", "epoch", "progress"):
            raise GraphError(f"the loss reads batch.{name}, which a replay would not follow")
        return object.__getattribute__(self, name)


def _copied(loss: Tensor, count: Tensor | float) -> LaneStats:
    """What a replay measured; the next one overwrites it."""
    return LaneStats(loss.clone(), count.clone() if isinstance(count, Tensor) else count)


class _CapturableOptimizers:
    """Optimizers as torch needs them in a capture, and whether they are unchanged since."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        fixed = [
            (group, key) for group in self._groups for key in group if key not in _READ_EACH_TIME
        ]
        self._fixed = [(group, key, group[key]) for group, key in fixed]

    @property
    def unchanged(self) -> bool:
        return all(group[key] == value for group, key, value in self._fixed)

    @contextmanager
    def capturable(self) -> Iterator[None]:
        """Fused optimizers are capturable anyway, but torch checks the flag."""
        before = [(group, group["capturable"]) for group in self._groups if "capturable" in group]
        for group, _ in before:
            group["capturable"] = True
        try:
            yield
        finally:
            for group, flag in before:
                group["capturable"] = flag


class UpdateGraph:
    """Clipping and the optimizers' steps, on gradients at fixed places."""

    def __init__(self, change: Change, parts: GraphParts, pool: Any) -> None:
        self._params = parts.params
        self._places = [param.grad for param in parts.params]
        self._optimizers = _CapturableOptimizers(parts.optimizers)
        self._graph = torch.cuda.CUDAGraph()
        with self._optimizers.capturable(), torch.cuda.graph(self._graph, pool=pool):
            self._norms = change()

    def fits(self) -> bool:
        """Whether the gradients lie where they lay, and nothing it has captured has changed."""
        pairs = zip(self._params, self._places, strict=True)
        return all(param.grad is place for param, place in pairs) and self._optimizers.unchanged

    def replay(self) -> Tensor | None:
        self._graph.replay()
        return None if self._norms is None else self._norms.clone()


class WholeStep:
    """A lane's forward and backward pass and the update after it, as one graph."""

    def __init__(
        self,
        shape: Any,
        lane: LaneGraph,
        change: Change,
        optimizers: Sequence[Optimizer],
        pool: Any,
    ) -> None:
        self.shape, self._lane = shape, lane
        self._optimizers = _CapturableOptimizers(optimizers)
        self._graph = torch.cuda.CUDAGraph()
        lane.clear()
        with self._optimizers.capturable(), torch.cuda.graph(self._graph, pool=pool):
            self._loss, self._count = lane.run()
            self._norms = change()
            self._pair = _side_by_side(self._loss, self._norms)
        self.grads = lane.take_grads()
        self.norms: Tensor | None = None
        """Of the last replay."""

    def fits(self) -> bool:
        return self._optimizers.unchanged

    def replay(self, values: Sequence[Any]) -> LaneStats:
        self._lane.refill(values)
        self._graph.replay()
        if self._pair is not None and not isinstance(self._count, Tensor):
            loss, self.norms = self._pair.clone().unbind()
            return LaneStats(loss, self._count)
        self.norms = None if self._norms is None else self._norms.clone()
        return _copied(self._loss, self._count)


def _side_by_side(loss: Tensor, norms: Tensor | None) -> Tensor | None:
    """Both in one tensor, where that can be: one copy takes them out."""
    if norms is None or (norms.shape, norms.dtype) != (loss.shape, loss.dtype):
        return None
    return torch.stack((loss, norms))


def _host_generators() -> tuple[Any, ...]:
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
