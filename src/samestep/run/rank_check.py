"""Checks that all ranks hold the same weights, buffers and optimizer states, and names those that do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.distributed.context import RunContext
from samestep.errors import RanksDiffer
from samestep.reduce.owners import is_held
from samestep.run.state_tensors import named_modules, optimizer_tensors
from samestep.words import listed

_AT_ONCE = 1 << 22
_SHOWN = 5
_MULTIPLIER = 6364136223846793005
"""Knuth's: odd, so that no position's bits are lost."""


def refuse_different_ranks(
    context: RunContext,
    step: int,
    modules: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    skip_buffers: bool,
    has_owners: bool = False,
) -> None:
    """Compare checksums over the ranks; names the tensors that differ, and where.

    Args:
        skip_buffers: Whether ranks may have other buffers.
        has_owners: Whether a weight, or a state of an optimizer, may be on one rank alone.
    """
    tensors = _named_tensors(modules, optimizers, skip_buffers)
    gathered = context.gather(dict(zip(tensors, _checksums(list(tensors.values())), strict=True)))
    if has_owners:
        whole = {name: value for rank in reversed(gathered) for name, value in rank.items()}
        gathered = [{**whole, **rank} for rank in gathered]
    differing = _differences(gathered)
    if differing:
        more = f"\n  ... and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise RanksDiffer(
            f"the ranks are not the same after step {step}:\n  "
            + "\n  ".join(differing[:_SHOWN])
            + more
            + "\nSomething changed them on some ranks only, or drew from a separate generator"
        )


def _named_tensors(
    modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], skip_buffers: bool
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for prefix, module in named_modules(modules):
        tensors = [*module.named_parameters(), *([] if skip_buffers else module.named_buffers())]
        found |= {f"{prefix}.{name}": tensor for name, tensor in tensors}
    found |= optimizer_tensors(modules, optimizers)
    return {name: tensor for name, tensor in found.items() if is_held(tensor)}


def _checksums(tensors: Sequence[Tensor]) -> list[int]:
    """One number a tensor, of its bits and their places; waits for the device once."""
    sums = [_checksum(tensor.detach()) for tensor in tensors]
    return torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []


def _checksum(tensor: Tensor) -> Tensor:
    # Integers wrap around and add up in any order: no rounding, the same on every device.
    bits = tensor.contiguous().view(-1).view(torch.uint8).split(_AT_ONCE)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, part in enumerate(bits):
        places = torch.arange(1, len(part) + 1, device=part.device) * _MULTIPLIER
        total += (part.to(torch.int64) * (places ^ (places >> 29))).sum() * (2 * number + 1)
    return total


def _differences(gathered: Sequence[Mapping[str, int]]) -> list[str]:
    lines = []
    for name in sorted(set().union(*gathered)):
        values = [rank.get(name) for rank in gathered]
        if len(set(values)) > 1:
            groups: dict[int | None, list[int]] = {}
            for rank, value in enumerate(values):
                groups.setdefault(value, []).append(rank)
            largest = max(groups.values(), key=len)
            others = [rank for rank in range(len(gathered)) if rank not in largest]
            lines.append(f"{name} on {listed('rank', others)} is not what it is on {listed('rank', largest)}")
    return lines
