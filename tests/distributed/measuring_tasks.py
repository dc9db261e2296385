"""Tasks whose validation could depend on the ranks: extra modules, nested metrics, moving buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from samestep import LaneBatch
from tests.sameness.models.base import CLASSES, FEATURES, Classify, points


class Linear(Classify):
    """A linear model; the others change one thing of it."""

    def model(self) -> nn.Module:
        return nn.Linear(FEATURES, CLASSES)

    def valid_data(self) -> Any:
        return TensorDataset(*points(37))


class Wrapped(Linear):
    """Metrics inside metrics, and metrics that draw when they are made, updated and computed."""

    def metrics(self) -> Mapping[str, Any]:
        from torchmetrics import MetricCollection, SumMetric
        from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
        from torchmetrics.wrappers import BootStrapper, ClasswiseWrapper, MinMaxMetric

        class Blurred(SumMetric):
            def __init__(self) -> None:
                super().__init__()
                self.shift = float(torch.rand(()))

            def update(self, scores: Tensor, y: Tensor) -> None:
                super().update(scores + self.shift)

            def compute(self) -> Tensor:
                return super().compute() + torch.rand(())

        def accuracy(average: Any = "micro", top_k: int = 1) -> Any:
            return MulticlassAccuracy(CLASSES, average=average, top_k=top_k)

        return {
            "plain": accuracy(),
            "minmax": MinMaxMetric(accuracy()),
            "twice": 2 * accuracy(),
            "boot": BootStrapper(accuracy(), num_bootstraps=3),
            "by": ClasswiseWrapper(accuracy(None)),
            "all": MetricCollection({"one": accuracy(), "two": accuracy(top_k=2)}),
            "auroc": MulticlassAUROC(CLASSES),
            "blurred": Blurred(),
            "mergeable": Hits(),
        }

    def evaluate(self, model: nn.Module, batch: LaneBatch, metrics: Mapping[str, Any]) -> tuple[Tensor, int]:
        scores = model(batch.x).softmax(1)
        for metric in metrics.values():
            metric.update(scores, batch.y)
        return self.loss(model, batch)


class Hits:
    """A metric of no library: it updates, merges and computes."""

    def __init__(self) -> None:
        self.right, self.seen = 0, 0

    def update(self, scores: Tensor, y: Tensor) -> None:
        self.right += int((scores.argmax(1) == y).sum())
        self.seen += len(y)

    def merge(self, other: Hits) -> None:
        self.right += other.right
        self.seen += other.seen

    def compute(self) -> dict[str, float]:
        return {"accuracy": self.right / self.seen, "seen": self.seen}


class Unmergeable(Wrapped):
    """A metric that no lane's copy can be added to."""

    def metrics(self) -> Mapping[str, Any]:
        from torchmetrics import SumMetric
        from torchmetrics.wrappers import Running

        return {"window": Running(SumMetric())}


class _Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.calls = self.calls + 1
        return x


class MovingBuffer(Linear):
    """A buffer that counts batches of the validation."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, CLASSES), _Counter())
