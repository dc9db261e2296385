"""Gradients that a loop accumulates over steps, as a part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn import Parameter

from samestep.step.module_calls import ModuleCalls


class PendingGradients:
    """What a loop has in `.grad` and no update has read yet, where it accumulates over steps: a part of a checkpoint."""

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
