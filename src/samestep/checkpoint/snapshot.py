"""A copy of a state in host memory, taken between two steps and written behind the next ones."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Mapping
from pickle import PicklingError, UnpicklingError
from typing import Any

import torch
from torch import Tensor

from samestep.errors import CheckpointError

_PLAIN = (type(None), bool, int, float, str, bytes)


class Snapshot:
    """Host buffers that a state is copied into, again and again. Page-locked beside a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._checked = False

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state with every tensor in it copied to the host; waits for the copies only."""
        on_gpu: list[torch.device] = []
        copy: dict[str, Any] = self._copy(state, "", on_gpu)
        for device in set(on_gpu):
            torch.cuda.current_stream(device).synchronize()
        if not self._checked:  # its structure stays; its numbers are of no matter here
            _refuse_unreadable(copy)
            self._checked = True
        return copy

    def _copy(self, value: Any, path: str, on_gpu: list[torch.device]) -> Any:
        if isinstance(value, Tensor):
            if value.device.type == "cuda":
                on_gpu.append(value.device)
            return self._buffer(path, value).copy_(value.detach(), non_blocking=True)
        if isinstance(value, Mapping):
            items = {key: self._copy(v, f"{path}.{key}", on_gpu) for key, v in value.items()}
            # A Counter, such as MultiStepLR's milestones, must stay one.
            kind: Any = type(value)
            return items if kind in (dict, OrderedDict) else kind(items)
        if type(value) in (list, tuple):
            copied = [self._copy(v, f"{path}.{i}", on_gpu) for i, v in enumerate(value)]
            return copied if isinstance(value, list) else tuple(copied)
        if isinstance(value, _PLAIN) or not hasattr(value, "item"):
            return value
        return value.item()  # a NumPy number

    def _buffer(self, path: str, like: Tensor) -> Tensor:
        known = self._buffers.get(path)
        if known is None or known.shape != like.shape or known.dtype != like.dtype:
            pinned = like.device.type == "cuda"
            # In the tensor's own memory layout: which code an optimizer runs, and so its last
            # bit, can depend on it.
            known = torch.empty_like(like, device="cpu", pin_memory=pinned, requires_grad=False)
            self._buffers[path] = known
        return known


def _refuse_unreadable(state: Mapping[str, Any]) -> None:
    """Refuse a state that could be written but not read back without running code from it."""
    for path, value in _leaves(state, ""):
        if isinstance(value, (*_PLAIN, Tensor)):
            continue
        file = io.BytesIO()
        try:
            torch.save(value, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except (PicklingError, UnpicklingError, RuntimeError, AttributeError, TypeError):
            raise CheckpointError(
                f"{path} is a {type(value).__name__}, which a checkpoint cannot hold: give tensors, "
                "numbers, text, lists and dicts in state_dict()"
            ) from None


def _leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and type(value) is dict:
        return [
            leaf for key, v in value.items() for leaf in _leaves(v, f"{path}.{key}".lstrip("."))
        ]
    if isinstance(value, (list, tuple)):
        return [leaf for i, v in enumerate(value) for leaf in _leaves(v, f"{path}.{i}")]
    return [(path, value)]
