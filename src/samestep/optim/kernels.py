"""The choice of torch's kernels: for the whole process, set for a run and put back after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.utils.deterministic

from samestep.environment.variables import exporting, process_environment
from samestep.optim.precision import Precision

Deterministic = bool | Literal["warn"]
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def choose_kernels(precision: Precision, deterministic: Deterministic) -> Callable[[], None]:
    """Let a GPU compute in this precision and, unless it may not, with the same bits each time.

    Args:
        precision: Whether matrix products round to tf32.
        deterministic: Whether an operation without a deterministic form is an error (True), a
            warning, or no matter (False).

    Returns:
        What puts everything back as it was. It may be called more than once.
    """
    if precision.device.type != "cuda":
        return lambda: None
    before = torch_settings()
    if deterministic:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        # With warnings only, torch still takes the random form of some, such as flash attention.
        torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
        # It would fill all new memory with NaN, which changes no result of a correct program.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    allow_deterministic_products(precision.device)
    tf32 = precision.kind == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    return lambda: put_back(before)


def allow_deterministic_products(device: torch.device) -> None:
    """Let torch find the setting without which it takes no matrix product for deterministic.

    It looks once in a process, with the first product: that is computed here, also for runs whose
    kernels may vary, since another one may follow. Then the setting is withdrawn. torch would read it
    again in every product, by a regular expression: with it a GPT's eager step on an H200 took 43 ms,
    and 27 without. And it is not needed: torch gives each stream a workspace of its own, which is
    what makes cuBLAS deterministic. The one that this product makes is at least as large as later
    ones need, and stays: graphs of other runs may hold the addresses of such memory.
    """
    if process_environment().get(_WORKSPACE) is not None or not torch.cuda.is_available():
        return
    with exporting({_WORKSPACE: ":4096:8"}):
        one = torch.ones(1, 1, device=device)
        torch.mm(one, one)


def torch_settings() -> dict[str, Any]:
    """Return the settings of torch, of which a training may want something else."""
    return {
        "deterministic": torch.backends.cudnn.deterministic,
        "benchmark": torch.backends.cudnn.benchmark,
        "tf32": torch.backends.cudnn.allow_tf32,
        "matmul": torch.get_float32_matmul_precision(),
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    }


def put_back(before: dict[str, Any]) -> None:
    """Compute with these settings from now on."""
    torch.backends.cudnn.deterministic = before["deterministic"]
    torch.backends.cudnn.benchmark = before["benchmark"]
    torch.backends.cudnn.allow_tf32 = before["tf32"]
    torch.set_float32_matmul_precision(before["matmul"])
    torch.use_deterministic_algorithms(before["algorithms"], warn_only=before["warn_only"])
    torch.utils.deterministic.fill_uninitialized_memory = before["fill"]  # type: ignore[attr-defined]
