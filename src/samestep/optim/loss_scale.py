"""Checks whether gradients are finite, and dynamic loss scaling.

Everything stays on the device. Every rank checks the same sum and so makes the same decision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from samestep.config.optim import LossScaleConfig
from samestep.reduce.scaling import Scaling


class CheckedScaling(Scaling):
    """Also finds out whether a gradient is NaN or infinite."""

    checks = True
    found: Tensor

    def __init__(self, device: torch.device) -> None:
        self.found = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)
        self._one_in_double = self._one.double()

    def begin(self) -> None:
        self.found.zero_()

    def apply(self, grads: Sequence[Tensor | None], factor: Tensor | float) -> None:
        inverse = self._inverse * factor
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for grad in grads:
            if grad is not None:
                real = torch.view_as_real(grad) if grad.is_complex() else grad
                by_type.setdefault(real.dtype, []).append(real)
        for dtype, group in by_type.items():
            if dtype == torch.bfloat16:  # which torch's check does not know
                sums = [grad.sum(dtype=torch.float32) for grad in group]
                self._note(torch.stack(sums).isfinite().all())
                torch._foreach_mul_(group, inverse)
                continue
            # The check takes a float32 factor, which would round float64 gradients.
            wide = dtype == torch.float64
            checked_by = self._one if wide else inverse.float()
            torch._amp_foreach_non_finite_check_and_unscale_(group, self.found, checked_by)
            if wide:
                torch._foreach_mul_(group, inverse)

    def check_losses(self, losses: Sequence[Tensor | float]) -> None:
        on_host = [loss for loss in losses if not isinstance(loss, Tensor)]
        if not all(map(math.isfinite, on_host)):
            self.found.fill_(1.0)
        tensors = [loss for loss in losses if isinstance(loss, Tensor)]
        if tensors:
            self._note(torch.stack(tensors).sum(dtype=torch.float64).isfinite())

    def _note(self, finite: Tensor) -> None:
        # Never 2: fused optimizers skip at exactly 1.
        self.found.clamp_(min=finite.logical_not().to(self.found))

    @property
    def _inverse(self) -> Tensor:
        """Return what takes `start` out again."""
        return self._one_in_double


class LossScale(CheckedScaling):
    """Dynamic loss scaling: as large a scale as does not overflow fp16.

    It applies to the mean loss, whatever the lanes' losses are summed over: backpropagation
    starts from scale / n, n being the largest count of a step so far, as a power of two.
    """

    scale: Tensor

    def __init__(self, rules: LossScaleConfig, device: torch.device, expected_count: int) -> None:
        super().__init__(device)
        self._rules = rules
        self.lowest_scale = rules.min
        self.scale = torch.full((), rules.init, device=device)
        self._good = torch.zeros((), dtype=torch.int32, device=device)
        """Steps without overflow since the scale last changed."""
        self._left = torch.full((), float(rules.hysteresis), device=device)
        """Overflows that are still tolerated before it shrinks."""
        self._counted = torch.ones((), device=device)
        self._start = self.scale.clone()
        self.expect(expected_count)

    def expect(self, count: int) -> None:
        self._counted.fill_(_power_of_two(count))
        torch.div(self.scale, self._counted, out=self._start)

    @property
    def start(self) -> Tensor:
        return self._start

    @property
    def _inverse(self) -> Tensor:
        return self._start.double().reciprocal()

    def update(self, count: Tensor | float) -> None:
        """After a step: shrink at an overflow, grow after many steps without one."""
        rules, overflow = self._rules, self.found
        if rules.hysteresis > 1:
            overflow = self._counting_down(overflow)
        torch._amp_update_scale_(self.scale, self._good, overflow, rules.growth, rules.backoff, rules.interval)
        self.scale.clamp_(rules.min, rules.max)
        if isinstance(count, Tensor):
            self._counted.copy_(torch.maximum(self._counted, _power_of_two_tensor(count)))
        elif count:
            self._counted.clamp_(min=_power_of_two(count))
        torch.div(self.scale, self._counted, out=self._start)

    def _counting_down(self, overflow: Tensor) -> Tensor:
        """1 only for the overflow that is one too many; every overflow restarts the growth."""
        bad = overflow > 0
        self._good.masked_fill_(bad, -1)  # which torch counts up to 0 if there is no overflow for it
        left = torch.where(bad, self._left - 1, float(self._rules.hysteresis))
        shrinks = left <= 0
        self._left.copy_(torch.where(shrinks, float(self._rules.hysteresis), left))
        return shrinks.to(overflow.dtype)

    def _tensors(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good steps": self._good, "overflows left": self._left, "counted": self._counted}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._tensors())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name])
        torch.div(self.scale, self._counted, out=self._start)


def _power_of_two(count: float) -> float:
    return math.ldexp(1.0, math.frexp(count)[1] - 1)


def _power_of_two_tensor(count: Tensor) -> Tensor:
    exponent = torch.frexp(count.to(torch.float64))[1] - 1
    return torch.ldexp(torch.ones_like(count, dtype=torch.float32), exponent)


def grad_scalers(objects: Sequence[Any]) -> dict[str, GradScaler]:
    """Return a loop's own scalers among the objects, by the names that checkpoints have for them."""
    found = [item for item in objects if isinstance(item, GradScaler)]
    return {f"scaler {number}": item for number, item in enumerate(found)}
