"""F1 of tokens and of entities as counts that add up: the same however the validation set is distributed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tags import IGNORED, entities_of, labels_of
from torch import Tensor

RIGHT, PREDICTED, TRUE = range(3)


def f1_of(counts: Tensor) -> Tensor:
    """F1 of (..., 3) counts; 0 where there is nothing."""
    both = counts[..., PREDICTED] + counts[..., TRUE]
    return 2 * counts[..., RIGHT].double() / both.clamp(min=1)


class Counts:
    """How many were right, were predicted, and were there: a row for each label, or type."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.counts = torch.zeros(len(self.names), 3, dtype=torch.int64)

    def merge(self, other: Counts) -> None:
        """Add what another lane has counted."""
        self.counts += other.counts


class TokenMacroF1(Counts):
    """The mean of the labels' F1, O included, over labels that occur in the truth or among the predictions."""

    def __init__(self, types: Sequence[str]) -> None:
        super().__init__(labels_of(types))

    def update(self, predicted: Tensor, labels: Tensor) -> None:
        """Count a batch: numbers of labels, both (samples, tokens)."""
        kept = labels != IGNORED
        predicted, labels = predicted[kept].cpu(), labels[kept].cpu()
        for column, numbers in ((RIGHT, labels[predicted == labels]), (PREDICTED, predicted), (TRUE, labels)):
            self.counts[:, column] += torch.bincount(numbers, minlength=len(self.names))

    def compute(self) -> float:
        present = self.counts[:, PREDICTED] + self.counts[:, TRUE] > 0
        return float(f1_of(self.counts[present]).mean()) if present.any() else 0.0


class EntityF1(Counts):
    """F1 of whole entities: right are those whose type, first and last token are."""

    def __init__(self, types: Sequence[str]) -> None:
        super().__init__(types)
        self._labels = labels_of(types)

    def update(self, predicted: Tensor, labels: Tensor) -> None:
        """Count a batch: numbers of labels, both (samples, tokens)."""
        places = {name: number for number, name in enumerate(self.names)}
        for mine, true in _rows(predicted, labels):
            found = set(entities_of([self._labels[number] for number in mine]))
            there = set(entities_of([self._labels[number] for number in true]))
            for column, spans in ((RIGHT, found & there), (PREDICTED, found), (TRUE, there)):
                for span in spans:
                    self.counts[places[span.type], column] += 1

    def compute(self) -> float:
        return float(f1_of(self.counts.sum(0)))


class PerEntity(EntityF1):
    """Precision, recall, F1 and support of each type."""

    def compute(self) -> dict[str, dict[str, float]]:  # type: ignore[override]
        right, predicted, true = self.counts.double().unbind(1)
        columns = {
            "precision": right / predicted.clamp(min=1),
            "recall": right / true.clamp(min=1),
            "f1": f1_of(self.counts),
            "support": true,
        }
        return {
            kind: {name: float(column[number]) for name, column in columns.items()}
            for number, kind in enumerate(self.names)
        }


def _rows(predicted: Tensor, labels: Tensor) -> Iterator[tuple[list[int], list[int]]]:
    """Yield each sample's numbers, without special tokens and padding."""
    for mine, true in zip(predicted.cpu(), labels.cpu(), strict=True):
        kept = true != IGNORED
        yield mine[kept].tolist(), true[kept].tolist()
