"""The names of measured values: flat, never the same twice; a few of them for the console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from samestep.errors import TaskError

Number = float | list[float]
SHOWN = 6
"""How many values a line on the console has; the tracked file has all."""


def flatten(values: Mapping[str, Any]) -> dict[str, Number]:
    """Numbers and lists of them, by name; a value inside another is `OUTER/INNER`.

    Raises:
        TaskError: If two values get the same name, or one is no number.
    """
    found: dict[str, Number] = {}
    for name, value in values.items():
        for path, number in _numbers(str(name), value):
            refuse_double(found, {path: number})
            found[path] = number
    return found


def refuse_double(known: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Raise if two sets of values have a name in common."""
    for name in more:
        if name in known:
            raise TaskError(f"two values of the evaluation are called {name}: rename a metric")


def _numbers(name: str, value: Any) -> Iterator[tuple[str, Number]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(f"{name}/{key}", inner)
    else:
        yield name, _plain(name, value)


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, (int, float)):
        return value
    raise TaskError(
        f"metric {name} computes a {type(value).__name__}: it must give numbers, tensors, or lists or mappings of them"
    )


def console_text(values: Mapping[str, Number], monitored: str) -> str:
    """Return the values that a person follows: the loss, the monitored one, and few others."""
    scalars = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    first = [name for name in scalars if name.endswith("val_loss") or name == monitored]
    others = [name for name in scalars if name not in first and "/" not in name]
    shown = [*first, *others[: max(0, SHOWN - len(first))]]
    text = "  ".join(f"{name} {scalars[name]:.4f}" for name in shown)
    hidden = len(values) - len(shown)
    return text + (f"  (and {hidden} in metrics.jsonl)" if hidden else "")
