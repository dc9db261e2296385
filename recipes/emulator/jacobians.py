"""What the emulator's Jacobian is like, as metrics, and a run that ends once it no longer changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samestep import Run, RunListener
from samestep.errors import TaskError

_LEAST_SINGULAR = 1e-12


class JacobianMetrics:
    """Norms, condition and sensitivities of Jacobians [samples, outputs, inputs], of all samples of all ranks.

    All of them are sums and maxima over samples, so lanes can be merged.
    """

    def __init__(self, inputs: Sequence[str]) -> None:
        """Args:
        inputs: their names.
        """
        self._inputs = list(inputs)
        self.samples, self.entries = 0, 0
        self.sums = torch.zeros(5, dtype=torch.float64)
        """Frobenius norms, largest singular values, condition numbers; entries and their squares."""
        self.largest = 0.0
        self.sensitivity = torch.zeros(len(self._inputs), dtype=torch.float64)

    def update(self, jacobians: Tensor) -> None:
        wide = jacobians.detach().double().cpu()
        singular = torch.linalg.svdvals(wide)
        condition = singular[:, 0] / singular[:, -1].clamp(min=_LEAST_SINGULAR)
        frobenius = wide.square().sum((1, 2)).sqrt()
        parts = (frobenius, singular[:, 0], condition, wide, wide.square())
        self.sums += torch.stack([part.sum() for part in parts])
        self.samples += len(wide)
        self.entries += wide.numel()
        self.largest = max(self.largest, float(wide.abs().max()))
        self.sensitivity += wide.abs().mean(1).sum(0)

    def merge(self, other: JacobianMetrics) -> None:
        self.sums += other.sums
        self.samples += other.samples
        self.entries += other.entries
        self.largest = max(self.largest, other.largest)
        self.sensitivity += other.sensitivity

    def compute(self) -> dict[str, Any]:
        if not self.samples:
            return {}
        frobenius, spectral, condition = (self.sums[:3] / self.samples).tolist()
        mean, square = (self.sums[3:] / self.entries).tolist()
        by_input = (self.sensitivity / self.samples).tolist()
        return {
            "frobenius": frobenius,
            "spectral": spectral,
            "condition": condition,
            "max": self.largest,
            "std": math.sqrt(max(square - mean**2, 0.0)),
            "sensitivity": dict(zip(self._inputs, by_input, strict=True)),
        }


class JacobianStopping(RunListener):
    """Ends a run when its sensitivities have hardly changed for some evaluations in a row.

    Every rank sees the same values and so decides the same.
    """

    draws = False

    def __init__(self, run: Run, tolerance: float, patience: int, least_evaluations: int) -> None:
        """Args:
        run: the run that it may end.
        tolerance: the relative change of the sensitivities that counts as none.
        patience: after so many evaluations without a change, the run ends.
        least_evaluations: but not before so many.
        """
        if not tolerance > 0 or patience < 1:
            raise TaskError(
                f"params.jacobian_stopping has tolerance {tolerance} and patience {patience}: give a number above 0, "
                "and at least 1"
            )
        self._run, self._tolerance = run, tolerance
        self._patience, self._least = patience, least_evaluations
        self._before: list[float] = []
        self._still, self._evaluations = 0, 0
        run.register("jacobian stopping", self)

    def on_evaluation(self, step: int, values: Any) -> None:
        prefix = "jacobian/sensitivity/"
        now = [float(value) for name, value in values.items() if name.startswith(prefix)]
        if not now:  # an average of the weights, which is measured besides
            return
        self._evaluations += 1
        if self._before:
            change = math.dist(now, self._before) / max(math.hypot(*self._before), 1e-12)
            self._still = self._still + 1 if change < self._tolerance else 0
        self._before = now
        if self._still >= self._patience and self._evaluations >= self._least:
            why = f"the Jacobian has changed by less than {self._tolerance:g} in each of {self._still} evaluations"
            self._run.context.log.main(f"Stopping early: {why}")
            self._run.stop(why)

    def state_dict(self) -> dict[str, Any]:
        return {"before": self._before, "still": self._still, "evaluations": self._evaluations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before, self._still = list(state["before"]), state["still"]
        self._evaluations = state["evaluations"]
