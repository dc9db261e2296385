"""Nested batches and states: moved, cut, described and copied by one set of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def convert(data: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with every tensor in it changed."""
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, dict):
        return {key: convert(value, change) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(convert(value, change) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)([convert(value, change) for value in data])
    # Batches of other libraries (a transformers BatchEncoding, a packed sequence) move themselves.
    return change(data) if hasattr(data, "to") and hasattr(data, "pin_memory") else data


def leaves_of(data: Any) -> Iterator[Any]:
    """What a batch holds, one after the other."""
    if isinstance(data, torch.Tensor):  # first, since it is what most leaves are
        yield data
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from leaves_of(value)
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from leaves_of(value)
    else:
        yield data
