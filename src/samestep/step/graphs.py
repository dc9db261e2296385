"""Lanes and updates replayed as CUDA graphs: each lane's passes, and the update.

With one lane on one process both are one graph.

A graph is captured once a shape of batch has been seen a few times, compared with the eager pass
to the bit, and from then on replayed: its inputs are copied to where it reads them, the generator
is at the lane's stream as ever, learning rates and scales are read from the device. What does not
fit a captured graph runs eagerly, which gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.config import Config
from samestep.data.batch import LaneBatch
from samestep.data.device import is_large
from samestep.distributed.context import RunContext
from samestep.errors import GraphError
from samestep.optim.device_lr import takes_rate_from_device
from samestep.optim.update import Change
from samestep.pytree import leaves, signature
from samestep.reduce.buffer_slots import keep_buffers
from samestep.step.captures import GraphParts, LaneGraph, UpdateGraph, WholeStep
from samestep.step.lane_passes import LanePasses, LossFunction
from samestep.step.whole_lanes import WholeLanes

_UPDATES = 5
"""Captures of the update after which it is not captured again: something changes all the time."""
_WARM_UP = 3
"""Eager passes before a capture: libraries set themselves up in the first ones."""
_CAPTURABLE = (Tensor, bool, int, float, type(None))
_SHAPES = 4
"""Shapes of batches that are captured; each costs memory for its activations."""


def why_no_graph(
    config: Config, device: torch.device, optimizers: Sequence[Optimizer]
) -> str | None:
    """What keeps this run from CUDA graphs; None if nothing does."""
    if device.type != "cuda":
        return f"this rank runs on {device}"
    if config.same != "bits":
        return f"same: {config.same} uses DistributedDataParallel, which is not captured"
    if config.distributed.find_unused_parameters:
        return "distributed.find_unused_parameters lets parameters come and go"
    if config.memory.lane_split != 1:
        return "memory.lane_split runs lanes in pieces"
    if config.memory.checkpoint:
        return "memory.checkpoint reads the state of the generator, which a capture cannot"
    for optimizer in optimizers:
        if not takes_rate_from_device(optimizer):
            name = type(optimizer).__name__
            return f"{name} reads its learning rate on the host: make it {name}(..., fused=True)"
    return None


class GraphedLanes(WholeLanes):
    """Runs lanes and updates, eagerly at first and then by replay."""

    def __init__(self, context: RunContext, parts: GraphParts, strict: bool) -> None:
        """Args:
        context: This process's place in the run.
        parts: What is captured.
        strict: Whether a step that cannot be captured ends the run.
        """
        super().__init__(parts.precision)
        self.needs_function = "speed.graph: true" if strict else ""
        self._context, self._parts, self._strict = context, parts, strict
        self._pool = torch.cuda.graph_pool_handle()
        self._seen: dict[Any, int] = {}
        self._lanes: dict[Any, LaneGraph] = {}
        self._generator = torch.cuda.default_generators[context.device.index or 0]
        self._refused: set[Any] = set()
        self._update: UpdateGraph | None = None
        self._updates = 0
        self._captured_updates = 0
        self._whole: WholeStep | None = None
        self._whole_ran = False

    def run_lane(self, passes: LanePasses, batch: LaneBatch, loss: LossFunction) -> None:
        values = list(leaves(batch.data))
        shape = self._key(batch, loss)
        if self._whole is not None and self._whole.shape == shape and self._whole.fits():
            self._parts.rates.refresh()
            passes.enter_stream(on_device_only=True)
            passes.took_backward(self._whole.replay(self._to_copy(passes, batch, values)), None)
            self._whole_ran = True
            return
        graph = self._lanes.get(shape)
        if graph is None:
            passes.enter_stream()
            graph = self._capture(shape, passes.on_device(batch), loss)
        if graph is None:
            super().run_lane(passes, batch, loss)
            return
        passes.enter_stream(on_device_only=True)
        passes.took_backward(graph.replay(self._to_copy(passes, batch, values)), graph.grads)

    def _to_copy(
        self, passes: LanePasses, batch: LaneBatch, values: Sequence[Any]
    ) -> Sequence[Any]:
        """What a graph's inputs are copied from: large batches are on their way already."""
        if not is_large(values):
            return values
        return list(leaves(passes.on_device(batch).data))

    def _key(self, batch: LaneBatch, loss: LossFunction) -> Any:
        """What one graph is good for: a shape, a loss, and the modules' modes."""
        code = getattr(loss, "__code__", None) or getattr(loss, "__func__", loss)
        return signature(batch.data), code, *[module.training for module in self._parts.modules]

    def _capture(self, shape: Any, batch: LaneBatch, loss: LossFunction) -> LaneGraph | None:
        """The graph of batches of this shape, if it is time for one and there can be one."""
        self._seen[shape] = seen = self._seen.get(shape, 0) + 1
        if shape in self._refused or seen <= _WARM_UP:
            return None
        odd = [leaf for leaf in leaves(batch.data) if not isinstance(leaf, _CAPTURABLE)]
        if odd:
            why = f"a batch holds a {type(odd[0]).__name__}, which a replay would not follow"
            self._refuse(shape, why, GraphError(why))
            return None
        if len(self._lanes) == _SHAPES:
            self._refuse(shape, f"batches have more than {_SHAPES} shapes")
            return None
        spare, seed = self._generator.clone_state(), self._generator.initial_seed()
        graph = None
        try:
            with keep_buffers(self._parts.modules):
                graph = LaneGraph(self._parts, batch, loss, self._pool, self._generator)
            self._lanes[shape] = graph
            self._context.log.main("speed.graph: batches of a shape are replayed from here on")
        except (RuntimeError, GraphError) as error:
            why = str(error) or type(error).__name__
            if not isinstance(error, GraphError):
                why = f"the loss cannot be captured: {why.splitlines()[0]}"
            # A capture that failed leaves the generator unusable. Graphs hold on to its state:
            # with another one the others must be captured again.
            self._generator.graphsafe_set_state(spare)
            self._lanes.clear()
            self._whole = self._update = None
            self._pool = torch.cuda.graph_pool_handle()
            self._refuse(shape, why, error)
        self._generator.manual_seed(seed)  # the lane's stream, from its start
        return graph

    def _refuse(self, shape: Any, why: str, error: Exception | None = None) -> None:
        self._refused.add(shape)
        if self._strict and error is not None:
            raise GraphError(
                f"speed.graph: true, but {why}. speed.graph: auto then trains without"
            ) from error
        self._context.log.main(f"speed.graph: a batch runs without a graph: {why}")

    def run_update(self, change: Change) -> Tensor | None:
        """Run or replay what changes the weights; returns the gradient norms."""
        if self._whole_ran and self._whole is not None:
            self._whole_ran = False
            return self._whole.norms
        if not self._lanes and self._whole is None:
            return change()
        self._updates += 1
        if self._updates <= _WARM_UP:
            return change()
        if self._update is None or not self._update.fits():
            if self._captured_updates == _UPDATES:
                return change()
            self._captured_updates += 1
            if self._captured_updates == _UPDATES:
                self._context.log.main(
                    "speed.graph: updates run without a graph from here on: what an optimizer's "
                    "groups hold besides the learning rate, such as momentum, keeps changing"
                )
            self._update = UpdateGraph(change, self._parts, self._pool)
        norms = self._update.replay()
        if self._whole is None and self._parts.gradients.is_final_after_backward:
            self._merge(change)
        return norms

    def _merge(self, change: Change) -> None:
        """Capture the lane and the update as one graph, which replaces their own."""
        shape, lane = next(iter(self._lanes.items()))
        self._whole = WholeStep(shape, lane, change, self._parts.optimizers, self._pool)
        self._parts.gradients.move_to(self._whole.grads)
        self._lanes.clear()
        self._update = None
