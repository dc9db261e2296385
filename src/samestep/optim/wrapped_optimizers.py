"""Optimizers that an optimizer wraps, as SAM and Lookahead do: their state belongs into checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer


class WrappedOptimizer:
    """The state of an optimizer that another one wraps, and leaves out of its `state_dict`."""

    def __init__(self, wrapped: Optimizer) -> None:
        self._wrapped = wrapped

    def state_dict(self) -> dict[str, Any]:
        return self._wrapped.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Its groups are mostly the wrapper's own, which has them back already; loading would part them.
        groups = self._wrapped.param_groups
        self._wrapped.load_state_dict(state)
        for group, loaded in zip(groups, self._wrapped.param_groups, strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})
        self._wrapped.param_groups = groups


def wrapped_optimizers(optimizers: Sequence[Optimizer]) -> dict[str, WrappedOptimizer]:
    """Return the wrapped optimizers by name, but for those whose state is their wrapper's."""
    return {
        f"optimizer {number}.{name}": WrappedOptimizer(inner)
        for number, outer in enumerate(optimizers)
        for name, inner in vars(outer).items()
        if isinstance(inner, Optimizer)
        and inner.state is not outer.state
        and not any(inner is other for other in optimizers)
    }
