"""Steps replayed as CUDA graphs: each lane's forward and backward pass, and the update.

A graph is recorded once a shape of batch has been seen a few times, compared with the eager pass
to the bit, and from then on replayed: its inputs are copied to where it reads them, the generator
is at the lane's stream as ever, learning rates and scales are read from the device. What does not
fit a recorded graph runs eagerly, which gives the same bits.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.config import Config
from samestep.data import LaneBatch, convert, leaves_of
from samestep.errors import GraphError
from samestep.rates import takes_rate_from_device
from samestep.runtime.lanestats import LaneStats
from samestep.step import LossFunction, Step, StepEngine, run_at_once

_WARM_UP = 3
"""Eager passes before a recording: libraries set themselves up in the first ones."""
_SHAPES = 4
"""Shapes of batches that are recorded; each costs memory for its activations."""


def why_no_graph(
    config: Config, device: torch.device, optimizers: Sequence[Optimizer]
) -> str | None:
    """What keeps this run from CUDA graphs; None if nothing does."""
    if device.type != "cuda":
        return f"this rank runs on {device}"
    if config.same != "bits":
        return f"same: {config.same} is DistributedDataParallel's, which is not recorded"
    if config.distributed.find_unused_parameters:
        return "distributed.find_unused_parameters lets parameters come and go"
    if config.memory.lane_split != 1:
        return "memory.lane_split runs lanes in pieces"
    if config.memory.checkpoint:
        return "memory.checkpoint reads the state of the generator, which a recording cannot"
    for optimizer in optimizers:
        if not takes_rate_from_device(optimizer):
            name = type(optimizer).__name__
            return f"{name} reads its learning rate on the host: make it {name}(..., fused=True)"
    return None


class GraphedSteps:
    """Runs lanes and updates, eagerly at first and then by replay."""

    def __init__(
        self,
        engine: StepEngine,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        strict: bool,
    ) -> None:
        self._engine, self._modules, self._optimizers = engine, modules, optimizers
        self._strict = strict
        """Whether a step that cannot be recorded ends the run."""
        self._pool = torch.cuda.graph_pool_handle()
        self._seen: dict[Any, int] = {}
        self._lanes: dict[Any, _LaneGraph] = {}
        self._generator = torch.cuda.default_generators[engine.context.device.index or 0]
        self._refused: set[Any] = set()
        self._update: _UpdateGraph | None = None
        self._updates = 0
        engine.machinery.gradients.keeps_places = True

    def run_lane(self, step: Step, batch: LaneBatch, loss: LossFunction) -> None:
        shape = _shape_of(batch)
        graph = self._lanes.get(shape)
        if graph is None:
            graph = self._record(shape, batch, loss)
        if graph is None:
            run_at_once(step, batch, loss)
        else:
            step.took_backward(graph.replay(batch))

    def _record(self, shape: Any, batch: LaneBatch, loss: LossFunction) -> _LaneGraph | None:
        """The graph of batches of this shape, if it is time for one and it can be had."""
        self._seen[shape] = seen = self._seen.get(shape, 0) + 1
        if shape in self._refused or seen <= _WARM_UP:
            return None
        if len(self._lanes) == _SHAPES:
            self._refuse(shape, f"batches have more than {_SHAPES} shapes")
            return None
        spare, seed = self._generator.clone_state(), self._generator.initial_seed()
        graph = None
        try:
            with _kept(self._modules):
                graph = _LaneGraph(self._engine, batch, loss, self._pool, self._generator)
            self._lanes[shape] = graph
        except (RuntimeError, GraphError) as error:
            why = str(error) or type(error).__name__
            if not isinstance(error, GraphError):
                why = f"the loss cannot be recorded: {why.splitlines()[0]}"
            # A recording that failed leaves the generator unusable. Graphs hold on to its state:
            # with another one the others must be recorded anew.
            self._generator.graphsafe_set_state(spare)
            self._lanes.clear()
            self._refuse(shape, why, error)
        self._generator.manual_seed(seed)  # the lane's stream, from its start
        return graph

    def _refuse(self, shape: Any, why: str, error: Exception | None = None) -> None:
        self._refused.add(shape)
        if self._strict and error is not None:
            raise GraphError(
                f"speed.graph: true, but {why}. speed.graph: auto goes on without"
            ) from error
        self._engine.context.log.main(f"speed.graph: a batch runs without a graph: {why}")

    def run_update(self, change: Callable[[], Tensor | None]) -> Tensor | None:
        """Run or replay what changes the weights; gives the gradient norms."""
        if not self._lanes:
            return change()
        self._updates += 1
        if self._updates <= _WARM_UP:
            return change()
        places = [param.grad for param in self._engine.params]
        fixed = _settings(self._optimizers)
        if self._update is None or not self._update.fits(places, fixed):
            self._update = _UpdateGraph(change, places, fixed, self._optimizers, self._pool)
        return self._update.replay()


class _LaneGraph:
    """The forward and backward pass of batches of one shape."""

    def __init__(
        self,
        engine: StepEngine,
        batch: LaneBatch,
        loss: LossFunction,
        pool: Any,
        generator: torch.Generator,
    ) -> None:
        self._params = engine.params
        self._engine = engine
        data = convert(batch.data, lambda tensor: tensor.clone())
        self._batch = _RecordedBatch(batch.lane, data, batch.ids)
        self._inputs = _tensors_of(data)
        seed = generator.initial_seed()
        eager = self._pass(loss)
        self._clear()
        host_draws = _host_generators()
        self._graph = torch.cuda.CUDAGraph()
        generator.manual_seed(seed)
        with torch.cuda.graph(self._graph, pool=pool):
            self._loss, self._count = self._run(loss)
        self._grads = [param.grad for param in self._params]
        if host_draws != _host_generators():
            raise GraphError("the loss draws random numbers on the host, which a replay does not")
        generator.manual_seed(seed)
        self._graph.replay()
        recorded = [self._loss, *self._grads]
        if not _equal(eager, recorded):
            generator.manual_seed(seed)
            # Some kernels give other bits each time, which is not the recording's fault.
            varies = not _equal(eager, self._pass(loss))
            if not (varies and _close(eager, recorded)):
                raise GraphError(
                    "the recorded loss gives other numbers than the eager one: does it change "
                    "something in Python, or read what was not in the batch?"
                )

    def _run(self, loss: LossFunction) -> tuple[Tensor, Tensor | float]:
        engine = self._engine
        torch.clear_autocast_cache()  # it holds casts from outside the recording
        with engine.precision.forward():
            value, count = loss(self._batch)
        with engine.precision.backward():
            self._start = engine.machinery.gradients.start(value, count)
            value.backward(self._start)
        torch.clear_autocast_cache()
        return value.detach(), count

    def _pass(self, loss: LossFunction) -> list[Tensor | None]:
        """An eager pass; its loss and gradients."""
        self._clear()
        value, _ = self._run(loss)
        return [value, *(param.grad for param in self._params)]

    def _clear(self) -> None:
        for param in self._params:
            param.grad = None

    def replay(self, batch: LaneBatch) -> LaneStats:
        torch._foreach_copy_(self._inputs, _tensors_of(batch.data), non_blocking=True)
        self._graph.replay()
        for param, grad in zip(self._params, self._grads, strict=True):
            param.grad = grad
        count = self._count
        return LaneStats(self._loss.clone(), count.clone() if isinstance(count, Tensor) else count)


class _RecordedBatch(LaneBatch):
    """A batch that a loss is recorded with: its lane and samples would stay for ever."""

    def __len__(self) -> int:
        return len(object.__getattribute__(self, "ids"))

    def __getattribute__(self, name: str) -> Any:
        if name in ("lane", "ids"):
            raise GraphError(f"the loss reads batch.{name}, which a replay would not follow")
        return object.__getattribute__(self, name)


def _tensors_of(data: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(data) if isinstance(leaf, Tensor)]


class _UpdateGraph:
    """Clipping and the optimizers' steps, on gradients at fixed places."""

    def __init__(
        self,
        change: Callable[[], Tensor | None],
        places: Sequence[Tensor | None],
        fixed: list[Any],
        optimizers: Sequence[Optimizer],
        pool: Any,
    ) -> None:
        self._places, self._fixed = places, fixed
        self._graph = torch.cuda.CUDAGraph()
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        before = [group.get("capturable") for group in groups]
        for group, capturable in zip(groups, before, strict=True):
            if capturable is not None:
                group["capturable"] = True  # which torch asks for, though fused ones are anyway
        try:
            with torch.cuda.graph(self._graph, pool=pool):
                self._norms = change()
        finally:
            for group, capturable in zip(groups, before, strict=True):
                if capturable is not None:
                    group["capturable"] = capturable

    def fits(self, places: Sequence[Tensor | None], fixed: list[Any]) -> bool:
        same = all(now is then for now, then in zip(places, self._places, strict=True))
        return same and fixed == self._fixed

    def replay(self) -> Tensor | None:
        self._graph.replay()
        return None if self._norms is None else self._norms.clone()


def _settings(optimizers: Sequence[Optimizer]) -> list[Any]:
    """What a recorded update holds as it was; learning rates it reads anew."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _shape_of(batch: LaneBatch) -> Any:
    return tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves_of(batch.data)
    )


def _host_generators() -> tuple[Any, ...]:
    return (
        random.getstate(),
        pickle.dumps(np.random.get_state()),
        torch.default_generator.get_state().numpy().tobytes(),
    )


def _equal(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(left, right, strict=True)
    )


def _close(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> bool:
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(a.abs().max())) for a, b in pairs)


@contextmanager
def _kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Buffers as they were, after passes that do not count."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, old in zip(buffers, before, strict=True):
                buffer.copy_(old)
