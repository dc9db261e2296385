"""Activations that are not kept for backward but computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from samestep.errors import TaskError
from samestep.reduce.buffer_slots import keep_buffers


def checkpoint_activations(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Let these modules recompute their activations in backward; returns their names.

    Of nested modules only the outermost is changed.
    """
    chosen: list[str] = []
    modules = dict(model.named_modules())
    for pattern in patterns:
        if not any(name and fnmatchcase(name, pattern) for name in modules):
            known = ", ".join(name for name in modules if name and "." not in name)
            raise TaskError(
                f"memory.checkpoint: {pattern!r} matches no module; the model has "
                + (f"{known}, and what is inside of them" if known else "none inside of it")
            )
    for name, module in modules.items():
        inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if name and not inside and any(fnmatchcase(name, pattern) for pattern in patterns):
            module.forward = _computed_again(module)
            chosen.append(name)
    return chosen


def _computed_again(module: nn.Module) -> Callable[..., Any]:
    # The RNG is put back for the second pass, so that dropout drops the same.
    forward = partial(checkpoint, module.forward, use_reentrant=False)
    if not any(True for _ in module.buffers()):
        return forward
    # Else BatchNorm's statistics would move twice.
    return partial(forward, context_fn=partial(_both_passes, module))


def _both_passes(module: nn.Module) -> tuple[Any, Any]:
    return nullcontext(), keep_buffers([module])
