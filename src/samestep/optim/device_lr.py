"""Learning rates in device memory, where a CUDA graph finds them at each replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def takes_rate_from_device(optimizer: Optimizer) -> bool:
    """Return whether the optimizer reads its rates on the device: fused and capturable ones do."""
    return all(bool(group.get("fused")) or bool(group.get("capturable")) for group in optimizer.param_groups)


class DeviceRates:
    """The rates of the optimizers that can read them on a GPU.

    Whether a step is replayed or not, they are rounded to float32 there: both give the same bits.
    Schedules still see plain numbers.
    """

    def __init__(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self._groups: list[dict[str, Any]] = []
        if device.type == "cuda":
            able = [optimizer for optimizer in optimizers if takes_rate_from_device(optimizer)]
            self._groups = [group for optimizer in able for group in optimizer.param_groups]
        self._known: list[float] = [float(group["lr"]) for group in self._groups]
        self._tensors: list[Tensor] = [torch.tensor(rate, dtype=torch.float32, device=device) for rate in self._known]
        self._numbers: list[float] = []
        """What the groups had before the tensors were put there."""

    def refresh(self) -> None:
        """Bring what a schedule has changed to the device."""
        for place, group in enumerate(self._groups):
            if group["lr"] != self._known[place]:
                self._known[place] = float(group["lr"])
                self._tensors[place].fill_(self._known[place])

    def put(self) -> None:
        """Let the optimizers see the tensors."""
        self._numbers = [group["lr"] for group in self._groups]
        for group, tensor in zip(self._groups, self._tensors, strict=True):
            group["lr"] = tensor

    def put_back(self) -> None:
        """Let schedules see the numbers, also those that have not been brought to the device yet."""
        for group, rate in zip(self._groups, self._numbers, strict=True):
            group["lr"] = rate
