"""What an evaluation measures: means by name, and how near importances are to one component for each feature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = 0.1
"""By how much an importance may differ from 0 or 1 and still count as that."""


class Means:
    """Means over all samples of all ranks, by name."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}

    def update(self, name: str, total: Tensor, count: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float(total.double())
        self.counts[name] = self.counts.get(name, 0.0) + count

    def merge(self, other: Means) -> None:
        for name in other.sums:
            self.sums[name] = self.sums.get(name, 0.0) + other.sums[name]
            self.counts[name] = self.counts.get(name, 0.0) + other.counts[name]

    def compute(self) -> dict[str, float]:
        return {name: total / self.counts[name] for name, total in self.sums.items()}


class OfTheWeights:
    """Numbers that follow from the weights alone: every lane has the same."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def update(self, values: dict[str, float]) -> None:
        self.values = values

    def merge(self, other: OfTheWeights) -> None:
        self.values = self.values or other.values

    def compute(self) -> dict[str, float]:
        return self.values


def assignment(gains: Sequence[Sequence[float]]) -> list[int]:
    """For each row a column of its own, with the largest sum of gains: the Hungarian method.

    Args:
        gains: rows of equal length, which is at least their number.
    """
    rows, columns = len(gains), len(gains[0])
    row_price, column_price = [0.0] * (rows + 1), [0.0] * (columns + 1)
    owner, way = [0] * (columns + 1), [0] * (columns + 1)
    for row in range(1, rows + 1):
        owner[0], column = row, 0
        least, seen = [float("inf")] * (columns + 1), [False] * (columns + 1)
        while owner[column]:
            seen[column] = True
            current, step, following = owner[column], float("inf"), 0
            for other in range(1, columns + 1):
                if seen[other]:
                    continue
                cost = -gains[current - 1][other - 1] - row_price[current] - column_price[other]
                if cost < least[other]:
                    least[other], way[other] = cost, column
                if least[other] < step:
                    step, following = least[other], other
            for other in range(columns + 1):
                if seen[other]:
                    row_price[owner[other]] += step
                    column_price[other] -= step
                else:
                    least[other] -= step
            column = following
        while column:  # everybody on the way moves on by one
            owner[column] = owner[way[column]]
            column = way[column]
    found = [0] * rows
    for column in range(1, columns + 1):
        if owner[column]:
            found[owner[column] - 1] = column - 1
    return found


def sorted_columns(importances: Tensor) -> Tensor:
    """Return the columns in the order of the rows that they belong to, the others behind."""
    own = assignment(importances.double().tolist())
    taken = set(own)
    others = [column for column in range(importances.shape[1]) if column not in taken]
    return importances[:, [*own, *others]]


def identity_error(importances: Tensor) -> int:
    """Return how many importances are not what they would be with one component for each feature.

    Args:
        importances: (features, components), each row with one feature alone.
    """
    ordered = sorted_columns(importances)
    wanted = torch.eye(*ordered.shape, dtype=ordered.dtype)
    return int(((ordered - wanted).abs() > TOLERANCE).sum())
