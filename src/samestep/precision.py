"""In which number format the forward pass runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from samestep.config import Config


class Precision:
    """fp32 as it is, or bf16 by autocast; backward runs outside of it, as torch advises."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._bf16 = config.precision == "bf16"
        self._kind = device.type

    def forward(self) -> AbstractContextManager[object]:
        if not self._bf16:
            return nullcontext()
        return torch.autocast(self._kind, dtype=torch.bfloat16)

    def backward(self) -> AbstractContextManager[object]:
        if not self._bf16:
            return nullcontext()
        return torch.autocast(self._kind, enabled=False)
