"""Gradients that a loop accumulates: over backward passes, and over steps, as a part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.reduce.gradients import Grads
from samestep.step.module_calls import ModuleCalls


def kept_gradients(params: Sequence[Parameter]) -> Grads:
    """Return the gradients that a backward pass adds to."""
    return [param.grad for param in params]


def add_kept(params: Sequence[Parameter], kept: Grads) -> None:
    """Add what was in `.grad` before a backward pass to what it has left there."""
    both = [
        (param.grad, grad)
        for param, grad in zip(params, kept, strict=True)
        if param.grad is not None and grad is not None
    ]
    if both:
        torch._foreach_add_([new for new, _ in both], [old for _, old in both])
    for param, grad in zip(params, kept, strict=True):
        if param.grad is None:
            param.grad = grad


def scale_gradients(params: Sequence[Parameter], factor: Tensor | float) -> None:
    """Multiply the gradients by a factor."""
    grads = [param.grad for param in params if param.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor)


class PendingGradients:
    """Gradients that no update has read yet, where a loop accumulates over steps: a part of a checkpoint."""

    def __init__(self, params: Sequence[Parameter], calls: ModuleCalls) -> None:
        self._params, self._calls = params, calls

    def state_dict(self) -> dict[str, Any]:
        if self._calls.is_updated:
            return {}
        pairs = enumerate(param.grad for param in self._params)
        return {str(number): grad for number, grad in pairs if grad is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._calls.is_updated = not state
        for number, grad in state.items():
            param = self._params[int(number)]
            param.grad = grad.to(param)
