"""All lanes of a rank in one call of the loss function, for layers in which they meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from samestep.data.batch import LaneBatch, Moment
from samestep.errors import StepError
from samestep.step.engine import LossFunction
from samestep.step.lane_passes import LanePasses
from samestep.step.lane_tensor import LaneValue
from samestep.step.loop_body import LoopBody
from samestep.step.module_calls import ModuleCalls

T = TypeVar("T")


class LanesTogether:
    """Runs steps whose lanes pass each layer together."""

    needs_function = ""

    def __init__(self) -> None:
        self._calls = ModuleCalls([])

    def run_step(self, passes: LanePasses, loss: LossFunction) -> None:
        body, value = self.forward(passes, loss)
        body.backward(value)
        passes.update()

    def forward(self, passes: LanePasses, function: Callable[[LaneBatch], T]) -> tuple[LoopBody, T]:
        """Call a function once, with the batches of all lanes; returns what its backward pass needs."""
        for param in passes.engine.params:
            param.grad = None  # a loop's body would add to it
        body = LoopBody(passes, self._calls)
        data = body.enter()
        try:
            with passes.engine.setup.precision.forward():
                return body, function(BatchOfLanes(body, data, passes.moment))
        finally:
            body.leave()


class BatchOfLanes(LaneBatch):
    """The batches of all lanes of a rank, in tensors of lanes."""

    def __init__(self, body: LoopBody, data: Any, moment: Moment) -> None:
        self.__dict__["_body"] = body
        super().__init__(LaneValue(body.lanes, body.lanes), data, (), moment)  # type: ignore[arg-type]

    @property
    def size(self) -> int:
        """The number of samples in each lane."""
        body: LoopBody = self.__dict__["_body"]
        size: int = body.samples
        return size

    def __len__(self) -> int:
        raise StepError(
            "len(batch) with batchnorm: global, which runs all lanes in one call: write batch.size, the number of "
            "samples in each lane"
        )
