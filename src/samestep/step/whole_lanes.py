"""Lanes run at once, eagerly."""

from __future__ import annotations

from torch import Tensor

from samestep.data.batch import LaneBatch
from samestep.optim.precision import Precision
from samestep.optim.update import Change
from samestep.step.lane_passes import LanePasses, LossFunction


class WholeLanes:
    """Runs every lane at once, eagerly."""

    needs_function = ""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision

    def before_lanes(self, passes: LanePasses, loss: LossFunction) -> None:
        """Nothing to prepare."""

    def run_lane(self, passes: LanePasses, batch: LaneBatch, loss: LossFunction) -> None:
        passes.enter_stream()
        with passes.forward_scope(), self._precision.forward():
            passes.backward(loss(passes.on_device(batch)))

    def run_update(self, change: Change) -> Tensor | None:
        return change()
