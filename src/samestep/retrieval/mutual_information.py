"""How much two partitions of the same samples have in common: classes and clusters."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def normalized_mutual_information(left: Tensor, right: Tensor) -> float:
    """NMI: 1 if both partitions are one, 0 if neither says anything of the other.

    Args:
        left: Of each sample, the part it is in.
        right: The same, by another partition.
    """
    table = _contingency(left, right)
    if 1 in table.shape and table.shape[0] == table.shape[1]:
        return 1.0
    found = _mutual_information(table)
    return found / _mean_entropy(table) if found > 0 else 0.0


def adjusted_mutual_information(left: Tensor, right: Tensor) -> float:
    """AMI: NMI less what partitions of these sizes have in common by chance.

    Args:
        left: Of each sample, the part it is in.
        right: The same, by another partition.
    """
    table = _contingency(left, right)
    if table.shape[0] == table.shape[1] and table.shape[0] in (1, int(table.sum())):
        return 1.0
    expected = _expected_information(table.sum(1), table.sum(0))
    beyond = _mean_entropy(table) - expected
    smallest = torch.finfo(torch.float64).eps
    beyond = min(beyond, -smallest) if beyond < 0 else max(beyond, smallest)
    return (_mutual_information(table) - expected) / beyond


def _contingency(left: Tensor, right: Tensor) -> Tensor:
    """How many samples are in each part of one and each part of the other."""
    rows, columns = left.unique(return_inverse=True)[1], right.unique(return_inverse=True)[1]
    shape = int(rows.max()) + 1, int(columns.max()) + 1
    flat = torch.bincount(rows * shape[1] + columns, minlength=shape[0] * shape[1])
    return flat.view(shape).double()


def _mutual_information(table: Tensor) -> float:
    whole = table.sum()
    by_chance = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / whole
    terms = torch.xlogy(table / whole, table / by_chance)
    return max(0.0, math.fsum(terms[table > 0].tolist()))


def _mean_entropy(table: Tensor) -> float:
    shares = [table.sum(axis) / table.sum() for axis in (0, 1)]
    return sum(-math.fsum(torch.xlogy(share, share).tolist()) for share in shares) / 2


def _expected_information(rows: Tensor, columns: Tensor) -> float:
    """The mutual information of random partitions whose parts have these sizes (hypergeometric)."""
    whole = int(rows.sum())
    # Of 0! to N!: each pair of sizes takes rows of it.
    logs = torch.lgamma(torch.arange(1, whole + 2, dtype=torch.float64))
    terms = []
    # Parts of one size have one term.
    for row, row_count in _sizes(rows):
        for column, column_count in _sizes(columns):
            neither = whole - row - column
            least, most = max(1, -neither), min(row, column)
            both = torch.arange(least, most + 1, dtype=torch.float64)
            likelihood = (
                logs[row] + logs[column] + logs[whole - row] + logs[whole - column] - logs[whole]
                - logs[least : most + 1]
                - logs[row - most : row - least + 1].flip(0)
                - logs[column - most : column - least + 1].flip(0)
                - logs[neither + least : neither + most + 1]
            ).exp()  # fmt: skip
            information = both / whole * (whole * both / (row * column)).log()
            terms.append(float((likelihood * information).sum()) * row_count * column_count)
    return math.fsum(terms)


def _sizes(parts: Tensor) -> list[tuple[int, int]]:
    """The sizes that parts have, and how many have each."""
    sizes, counts = torch.unique(parts.long(), return_counts=True)
    return list(zip(sizes.tolist(), counts.tolist(), strict=True))
