"""The last factor of the summed gradients, and whether their step counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Scaling:
    """Divides by the count and nothing else: every step counts, and the loss is not scaled.

    Checks for NaN and loss scaling (`optim.loss_scale`) extend it.
    """

    checks = False
    """Whether `apply` must see all gradients, whatever the factor, and a step may be skipped."""
    found: Tensor | None = None
    """1 on the device if something in this step is not finite; None if there is no check."""
    scale: Tensor | None = None
    """The loss scale, if there is one."""
    lowest_scale: float | None = None
    """The scale at which an overflow is no longer a matter of the scale."""

    @property
    def start(self) -> Tensor | None:
        """Return what backpropagation starts from instead of 1; `apply` takes it out again."""
        return None

    def begin(self) -> None:
        """Start a new step."""

    def expect(self, count: int) -> None:
        """Before the first step: roughly what its losses will be summed over."""

    def apply(self, grads: Sequence[Tensor | None], factor: Tensor | float) -> None:
        """Multiply the summed gradients, in place."""
        # A complex product with a real factor can turn -0.0 into 0.0: part by part it cannot.
        present = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads if grad is not None]
        if present:
            torch._foreach_mul_(present, factor)

    def check_losses(self, losses: Sequence[Tensor | float]) -> None:
        """Check the lanes' losses too: one can be infinite while the gradients are not."""

    def update(self, count: Tensor | float) -> None:
        """After a step: let the scale follow what was found."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs; empty if there is nothing to remember."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
