"""Batches on their way to the device: page-locked memory, and copies beside the computation."""

from __future__ import annotations

from typing import Any

import torch

from samestep.config.schema import LoaderConfig
from samestep.pytree import move, tensors


def pins_memory(loader: LoaderConfig, device: torch.device) -> bool:
    """Return whether batches for this device are read into page-locked memory."""
    setting = loader.pin_memory
    if setting == "auto":
        return device.type == "cuda"
    return bool(setting) and torch.cuda.is_available()  # a DataLoader, too, only warns without one


_COPIED_AT_ONCE = 1 << 16
"""Bytes up to which CUDA does not wait with a copy to the device, whatever memory it comes from."""


def pins_above(loader: LoaderConfig) -> int:
    """Bytes of a tensor above which the process that trains itself puts it into such memory.

    That costs some microseconds for each, and a small one gains nothing by it.
    """
    return _COPIED_AT_ONCE if loader.pin_memory == "auto" else -1


_WORTH_A_STREAM = 1 << 20
"""Bytes of a tensor from which on a copy beside the computation gains more than it costs."""


def is_large(data: Any) -> bool:
    """Return whether a batch should be copied beside what the device computes."""
    return any(tensor.nbytes > _WORTH_A_STREAM for tensor in tensors(data))


class DeviceCopies:
    """Brings batches to the device; large ones beside what a GPU computes, on another stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_device(self, data: Any) -> Any:
        """Return the batch with every tensor in it on the device."""
        if self._stream is None:
            return data
        if not is_large(data):
            return move(data, self._device)
        here = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copy = move(data, self._device)
        here.wait_stream(self._stream)
        # Else the allocator would give its memory to the next copy while it is still in use.
        for tensor in tensors(copy):
            if tensor.is_cuda:
                tensor.record_stream(here)
        return copy
