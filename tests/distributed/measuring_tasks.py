"""Tasks whose validation could depend on the ranks: extra modules, nested metrics, moving buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from samestep import LaneBatch, Task

CLASSES = 5


def points(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 16, generator=generator)
    y = torch.randint(0, CLASSES, (96,), generator=generator)
    return x[:samples], y[:samples]


class Linear(Task):
    """A linear model; the others change one thing of it."""

    def model(self) -> nn.Module:
        return nn.Linear(16, CLASSES)

    def optimizers(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def train_data(self) -> Any:
        return TensorDataset(*points(96))

    def valid_data(self) -> Any:
        return TensorDataset(*points(37))

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch)


class ExtraHead(Linear):
    """Dropout and BatchNorm in an extra module."""

    def __init__(self) -> None:
        self.head = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))

    def extra_modules(self) -> Any:
        return [self.head]

    def optimizers(self, model: nn.Module) -> Any:
        return torch.optim.SGD([*model.parameters(), *self.head.parameters()], lr=0.01)

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        logits = self.head(model(batch.x))
        return F.cross_entropy(logits, batch.y, reduction="sum"), len(batch)


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


class Counting(Wrapped):
    """A metric that counts where torchmetrics does not look."""

    def metrics(self) -> Mapping[str, Any]:
        from torchmetrics import SumMetric

        class Counted(SumMetric):
            calls = 0

            def update(self, scores: Tensor, y: Tensor) -> None:
                self.calls += 1
                super().update(scores)

        return {"counted": Counted()}


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
        return nn.Sequential(nn.Linear(16, CLASSES), _Counter())
