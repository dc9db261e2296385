"""Nested batches and states, walked by one set of rules: moved, pinned, cut, described, copied.

Containers are mappings, lists, tuples, named tuples and dataclasses; all else is a leaf.
torch.utils._pytree would serve for the first four, but takes what is not in its process-wide
registry for a leaf: a dataclass, or a Hugging Face BatchEncoding, would stay on the host.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.errors import TaskError

IsLeaf = Callable[[Any], bool]


def _never(node: Any) -> bool:
    return False


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    """Return what a container holds, by key or index; None for a leaf."""
    if isinstance(node, Tensor):  # first, since most nodes are
        return None
    if isinstance(node, (list, tuple)):
        return list(enumerate(node))
    if isinstance(node, Mapping):
        return list(node.items())
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    return None


def _rebuild(node: Any, children: Sequence[tuple[Any, Any]]) -> Any:
    """Return a container like this one with other children."""
    kind = type(node)
    if kind in (dict, OrderedDict):
        return dict(children)
    if kind is Counter:
        return Counter(dict(children))
    if isinstance(node, (list, tuple)):
        values = [value for _, value in children]
        return kind(*values) if hasattr(node, "_fields") else kind(values)
    if isinstance(node, Mapping) and not isinstance(node, MutableMapping):
        return dict(children)
    # A copy, so that what the object holds besides its items stays with it.
    other = copy.copy(node)
    if isinstance(node, MutableMapping):
        for key, value in children:
            other[key] = value
    else:
        for name, value in children:
            object.__setattr__(other, name, value)  # also of a frozen dataclass
    return other


def map_leaves(change: Callable[[Any], Any], data: Any, is_leaf: IsLeaf = _never) -> Any:
    """Return the same containers with every leaf changed."""
    if isinstance(data, Tensor) or is_leaf(data):
        return change(data)
    # Nearly every batch is of these; each lane of each step is walked several times.
    kind = type(data)
    if kind is tuple or kind is list:
        return kind([map_leaves(change, value, is_leaf) for value in data])
    if kind is dict:
        return {key: map_leaves(change, value, is_leaf) for key, value in data.items()}
    children = _children(data)
    if children is None:
        return change(data)
    return _rebuild(data, [(key, map_leaves(change, value, is_leaf)) for key, value in children])


def leaves(data: Any) -> list[Any]:
    """Return every leaf, in the order of the containers."""
    found: list[Any] = []
    _collect(data, found)
    return found


def _collect(data: Any, found: list[Any]) -> None:
    kind = type(data)
    if kind is Tensor:
        found.append(data)
    elif kind is tuple or kind is list:
        for value in data:
            _collect(value, found)
    elif kind is dict:
        for value in data.values():
            _collect(value, found)
    else:
        children = _children(data)
        if children is None:
            found.append(data)
            return
        for _, value in children:
            _collect(value, found)


def tensors(data: Any) -> list[Tensor]:
    """Return every tensor, in the order of the containers."""
    return [leaf for leaf in leaves(data) if isinstance(leaf, Tensor)]


# -- to a device ---------------------------------------------------------------------------


def _moves_itself(node: Any) -> bool:
    """Such as a packed sequence, whose batch sizes must stay on the host. Mappings are walked."""
    return hasattr(node, "to") and not isinstance(node, (Tensor, Mapping))


def move(data: Any, device: torch.device) -> Any:
    """Return the data with every tensor on the device; copies from pinned memory do not wait."""

    def to_device(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if _moves_itself(leaf) else leaf

    return map_leaves(to_device, data, _moves_itself)


def pin(data: Any, above: int = -1) -> Any:
    """Return the data in page-locked memory.

    Args:
        data: What to walk; it stays as it is.
        above: Tensors of up to so many bytes stay where they are.
    """

    def to_pinned(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.pin_memory() if leaf.nbytes > above else leaf
        return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf

    return map_leaves(to_pinned, data, _moves_itself)


# -- parts and descriptions ----------------------------------------------------------------


def take_samples(data: Any, start: int, stop: int, samples: int) -> Any:
    """Some samples of a batch: the first dimension of tensors, and lists with one entry each."""

    def is_column(node: Any) -> bool:
        """Return a list with an entry for each sample, such as their texts."""
        if not isinstance(node, (list, tuple)) or hasattr(node, "_fields"):
            return False
        return (
            len(node) == samples
            and all(_children(entry) is None for entry in node)
            and not any(isinstance(entry, Tensor) for entry in node)
        )

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.dim() and len(leaf) == samples:
                return leaf[start:stop]
            raise TaskError(
                f"a batch of {samples} samples cannot be cut: it holds a tensor of shape "
                f"{tuple(leaf.shape)}. Let every tensor have the samples as its first dimension"
            )
        if is_column(leaf):
            return leaf[start:stop]
        if leaf is None or isinstance(leaf, (bool, int, float, str)):
            return leaf
        raise TaskError(
            f"a batch of {samples} samples cannot be cut: it holds a {type(leaf).__name__}. Use "
            "tensors, lists and mappings"
        )

    return map_leaves(cut, data, is_column)


def signature(data: Any) -> Any:
    """Return a hashable description: shapes and types of tensors, values of numbers, types of all else."""
    if isinstance(data, Tensor):
        return data.shape, data.dtype
    if isinstance(data, (list, tuple)):
        return tuple([signature(value) for value in data])
    children = _children(data)
    if children is not None:
        return tuple([(key, signature(value)) for key, value in children])
    return data if data is None or isinstance(data, (bool, int, float)) else type(data)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have one type, shape, device and bits: NaN equals itself, -0.0 is not 0.0."""
    kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (left, right)]
    return kinds[0] == kinds[1] and torch.equal(*(t.detach().reshape(-1).view(torch.uint8) for t in (left, right)))


def digest(data: Any) -> str:
    """Return a short name for the content."""
    state = hashlib.blake2b(digest_size=8)
    _feed(data, state)
    return state.hexdigest()


def _feed(data: Any, state: hashlib.blake2b) -> None:
    if isinstance(data, Tensor):
        data = data.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    if isinstance(data, np.ndarray):
        state.update(data.tobytes())
        return
    children = _children(data)
    if children is None:
        state.update(repr(data).encode())
        return
    named = not isinstance(data, (list, tuple))
    for key, value in children:
        if named:
            _feed(key, state)
        _feed(value, state)
