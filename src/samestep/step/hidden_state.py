"""State of modules that no lane's stream and no checkpoint covers: noticed in the first lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_SHOWN = 3


class HiddenState:
    """Compares plain attributes of modules before and after a forward pass."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [
            (f"{prefix}." if prefix else "", part)
            for module in modules
            for prefix, part in module.named_modules()
        ]
        self._before = self._values()

    def changed(self) -> str:
        """A warning that names what has changed since; empty if nothing has."""
        now = self._values()
        names = [name for name, value in self._before.items() if now.get(name, value) != value]
        if not names:
            return ""
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return (
            f"forward changes {', '.join(names[:_SHOWN])}{more}, which no checkpoint holds, and which lanes "
            "on other ranks do not see. If the loss depends on it, the run is not the same at another "
            "size or after a resume: samestep verify --resumed finds out. Use a buffer, batch.step, or "
            "the global generators"
        )

    def _values(self) -> dict[str, Any]:
        return {
            f"{prefix}{name}": _comparable(value)
            for prefix, part in self._modules
            for name, value in vars(part).items()
            if isinstance(value, (bool, int, float, Tensor, torch.Generator)) and name != "training"
        }


def _comparable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, torch.Generator):
        return value.get_state().cpu().numpy().tobytes()
    # NaN is not equal to itself.
    return repr(value)
