"""A copy of a state in host memory, taken between two steps and written during the next ones."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pickle import PicklingError, UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.errors import CheckpointError

Path = tuple[Any, ...]
"""The keys and indices that lead to a value."""
_PLAIN = (type(None), bool, int, float, str, bytes)


class Snapshot:
    """Host buffers that a state is copied into at each save. Page-locked if the tensors are on a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[Path, tuple[Tensor, tuple[Any, ...]]] = {}
        """By path in the state, with the layout of the tensor that is copied into it."""

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a state, with every tensor in it on the host; waits only for these copies.

        Returns:
            The copy. Its tensors are the buffers: they change with the next `take`.

        Raises:
            CheckpointError: for a value that could not be read back without running code.
        """
        on_gpu: set[torch.device] = set()

        def copied(path: Path, value: Any) -> Any:
            kind = type(value)
            if kind in (list, tuple):
                return kind(copied((*path, at), entry) for at, entry in enumerate(value))
            if kind in (dict, OrderedDict, Counter):
                found = {_plain((), key): copied((*path, key), entry) for key, entry in value.items()}
                return Counter(found) if kind is Counter else found
            if isinstance(value, Tensor):
                if value.device.type == "cuda":
                    on_gpu.add(value.device)
                return self._buffer(path, value).copy_(value.detach(), non_blocking=True)
            return _plain(path, value)

        copy: dict[str, Any] = copied((), state)
        for device in on_gpu:
            torch.cuda.current_stream(device).synchronize()
        return copy

    def _buffer(self, path: Path, like: Tensor) -> Tensor:
        layout = (like.shape, like.dtype, like.stride())
        known, before = self._buffers.get(path, (None, None))
        if known is None or layout != before:
            pinned = like.device.type == "cuda"
            # With the same memory layout: which code an optimizer runs, and so its last bit, can
            # depend on it.
            known = torch.empty_like(like, device="cpu", pin_memory=pinned, requires_grad=False)
            self._buffers[path] = (known, layout)
        return known


def _plain(path: Path, value: Any) -> Any:
    """Return the value as one that can be read back without running code from it."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is set:
        return {_plain(path, entry) for entry in value}
    _refuse_unreadable(value, path)
    return value


def _refuse_unreadable(value: Any, path: Path) -> None:
    """Raise for what could be written, but not read back without running code from it."""
    file = io.BytesIO()
    try:
        if isinstance(value, (Mapping, np.ndarray)):
            raise TypeError("may hold tensors that change, or is read by running code")
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (PicklingError, UnpicklingError, RuntimeError, AttributeError, TypeError):
        raise CheckpointError(
            f"{'.'.join(map(str, path))} is a {type(value).__name__}, which a checkpoint cannot "
            "hold: give tensors, numbers, text, lists and dicts in state_dict()"
        ) from None
