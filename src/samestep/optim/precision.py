"""The number format of the forward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """fp32 as it is, tf32 inside matrix products, or bf16 and fp16 by autocast.

    Backward runs outside of autocast, as torch advises.
    """

    kind: str
    reason: str
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """Return what matrix products are computed in."""
        return _AUTOCAST.get(self.kind, torch.float32)

    def forward(self) -> AbstractContextManager[object]:
        if self.kind not in _AUTOCAST:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=_AUTOCAST[self.kind])

    def backward(self) -> AbstractContextManager[object]:
        if self.kind not in _AUTOCAST:
            return nullcontext()
        return torch.autocast(self.device.type, enabled=False)


def choose_precision(setting: str, device: torch.device) -> Precision:
    """Return the configured precision, or with `auto` what suits the device; and why."""
    if setting != "auto":
        return Precision(setting, f"precision: {setting}", device)
    kind, reason = best_precision(device)
    return Precision(kind, reason, device)


def best_precision(device: torch.device) -> tuple[str, str]:
    """bf16 where the hardware computes in it, fp16 on older GPUs, fp32 on CPUs; with the reason."""
    if device.type != "cuda":
        return "fp32", "auto: CPUs are not sure to be faster in bf16"
    major, minor = torch.cuda.get_device_capability(device)
    name = f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}"
    if major >= 8:
        return "bf16", f"auto: {name}, and bf16 needs 8.0"
    if major >= 7:
        return "fp16", f"auto: {name}; bf16 needs 8.0, fp16 with tensor cores 7.0"
    return "fp32", f"auto: {name}, and fp16 with tensor cores needs 7.0"
