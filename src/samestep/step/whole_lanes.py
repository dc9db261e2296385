"""Lanes run one after the other, eagerly."""

from __future__ import annotations

from samestep.data.batch import LaneBatch
from samestep.optim.precision import Precision
from samestep.step.engine import LossFunction
from samestep.step.lane_passes import LanePasses


class WholeLanes:
    """Runs every lane at once, eagerly."""

    needs_function = ""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision

    def run_step(self, passes: LanePasses, loss: LossFunction) -> None:
        for batch in passes.enter_lanes():
            self.run_lane(passes, batch, loss)
        passes.update()

    def run_lane(self, passes: LanePasses, batch: LaneBatch, loss: LossFunction) -> None:
        """Run the forward and backward pass of the open lane."""
        passes.enter_stream()
        with passes.forward_scope(), self._precision.forward():
            passes.backward(loss(passes.batches.on_device(batch)))
