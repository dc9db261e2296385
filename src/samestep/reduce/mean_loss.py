"""The mean loss of a step, from the losses and counts of its lanes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.lanes.tree import sum_of_lanes


def mean_loss(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return the loss per counted thing of a step, added up in the tree's order; never waits for a GPU.

    Args:
        values: Each lane's loss and count, one after the other.
        device: Where the mean is wanted.
    """
    loss, counts = _add_up(values[::2]), values[1::2]
    # In the order of the log, where that costs nothing.
    total = _add_up(counts) if any(isinstance(count, Tensor) for count in counts) else sum(counts)
    if not isinstance(total, Tensor):
        # As a tensor: a GPU divides by a number by multiplying with its inverse, which rounds once more.
        total = torch.full((), total, dtype=torch.float64, device=device)
    return torch.as_tensor(loss, dtype=torch.float64, device=device) / total


def _add_up(values: Sequence[Tensor | float]) -> Tensor | float:
    """Return the sum of all lanes in the tree's order."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return sum_of_lanes([float(value) for value in values])
    device = tensors[0].device
    scalars = (
        value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64, device=device)
        for value in values
    )
    return sum_of_rows(torch.stack(tuple(scalars)).double())


def sum_of_rows(rows: Tensor) -> Tensor:
    """Return the sum of one row per lane in the tree's order: level by level, in a few kernels."""
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        pairs = rows[:even:2] + rows[1:even:2]
        rows = pairs if even == len(rows) else torch.cat([pairs, rows[even:]])
    return rows[0]
