"""`speed.compile`: the model, or each of its blocks, compiled by torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from samestep.config import Config
from samestep.errors import TaskError
from samestep.reduce.weight_units import blocks_of, matching_modules

_COMPILED_SHAPES = 64


def compile_model(model: nn.Module, config: Config) -> None:
    """Compile the forward pass of a model, or of its blocks. Hooks of these modules stay outside.

    Each shape is compiled by itself: kernels follow from a lane's shape, not from earlier ones. Past the limit
    torch would fall back to eager, on ranks that have seen many shapes and not on others.

    Raises:
        TaskError: The model has no blocks.
    """
    import torch._dynamo.config as dynamo

    parts = {"": model}
    if config.speed.compile == "blocks":
        parts = blocks_of(model, config.distributed.shard_blocks)
        _refuse_checkpoints_inside(model, parts, config.memory.checkpoint)
    # Names that torch 2.6 knows too; later versions have them as aliases. Blocks share what is counted.
    most = _COMPILED_SHAPES * max(1, len(parts))
    dynamo.cache_size_limit, dynamo.fail_on_cache_limit_hit = most, True
    dynamo.accumulated_cache_size_limit = max(dynamo.accumulated_cache_size_limit, most)
    if not parts:
        raise TaskError(
            f"speed.compile: blocks found no ModuleList or Sequential of blocks in {type(model).__name__}: name them in "
            "distributed.shard_blocks, or set speed.compile: true"
        )
    for part in parts.values():
        _compile(part)


def _refuse_checkpoints_inside(model: nn.Module, blocks: Iterable[str], patterns: Sequence[str]) -> None:
    for name in matching_modules(model, patterns, "memory.checkpoint"):
        if any(name.startswith(f"{block}.") for block in blocks):
            raise TaskError(
                f"memory.checkpoint names {name}, which is inside of a block that speed.compile: blocks compiles: name "
                "the blocks, or what is around them"
            )


def _compile(module: nn.Module) -> None:
    forward = module.forward

    def compiled(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    # By a function of ours: torch skips its own classes' forward, such as nn.Sequential's.
    module.forward = torch.compile(compiled, dynamic=False)
