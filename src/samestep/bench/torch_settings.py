"""What the whole process computes with: each of several trainings in it has its own.

samestep chooses deterministic kernels while a run is open. A loop beside it is measured as people run
it, so each has its own settings in its turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.utils.deterministic

from samestep.bench.turns import Advance


@dataclass(frozen=True)
class TorchSettings:
    """Settings of torch, of which a training may want something else."""

    deterministic: bool
    warns_only: bool
    fills_memory: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    cudnn_tf32: bool
    matmul_precision: str

    @classmethod
    def current(cls) -> TorchSettings:
        """As they are now."""
        return cls(
            deterministic=torch.are_deterministic_algorithms_enabled(),
            warns_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            fills_memory=torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            cudnn_deterministic=torch.backends.cudnn.deterministic,
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            cudnn_tf32=torch.backends.cudnn.allow_tf32,
            matmul_precision=torch.get_float32_matmul_precision(),
        )

    def apply(self) -> None:
        """Compute with these from now on."""
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warns_only)
        torch.utils.deterministic.fill_uninitialized_memory = self.fills_memory  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.allow_tf32 = self.cudnn_tf32
        torch.set_float32_matmul_precision(self.matmul_precision)


class KeepingSettings:
    """A training that has its own settings of torch in its turns and leaves others theirs."""

    def __init__(self, open_it: Callable[[], Advance]) -> None:
        outside = TorchSettings.current()
        try:
            self._advance = open_it()
            self._own = TorchSettings.current()
        finally:
            outside.apply()

    def __call__(self, number: int) -> None:
        """Run so many steps."""
        outside = TorchSettings.current()
        if self._own != outside:
            self._own.apply()
        try:
            self._advance(number)
        finally:
            self._own = TorchSettings.current()
            if self._own != outside:
                outside.apply()
