"""Small tasks, each with one idiom of models that people write, which could depend on the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import samestep
from samestep import LaneBatch, Task

_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(90, 16, generator=_GENERATOR)
Y = torch.randint(0, 5, (90,), generator=_GENERATOR)


BUFFERS = ("reassigned", "bf16", "int64", "flag", "float64", "complex")
"""Kinds of buffers that tests/sameness/models/followers.py has."""


class Idiom(Task):
    """A linear classifier of numbers, around which the others put their idiom."""

    Net: type[nn.Module]

    def model(self) -> nn.Module:
        self.made = self.Net()
        return self.made

    def optimizers(self, model: nn.Module) -> Optimizer:
        return SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)

    def train_data(self) -> TensorDataset:
        return TensorDataset(X, Y)

    def valid_data(self) -> TensorDataset:
        return TensorDataset(X[:40], Y[:40])

    def loss(self, model: nn.Module, batch: LaneBatch) -> Any:
        return F.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch)


class RandomRates(Idiom):
    """A schedule whose function draws."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 5))

    def schedules(self, optimizers: Sequence[Optimizer], steps: int | None) -> samestep.Schedule:
        def factor(step: int) -> float:
            return 1.0 + float(torch.rand(()))

        return samestep.Schedule(LambdaLR(optimizers[0], factor))


class SparseTable(Idiom):
    """Sparse gradients from a function: no module says so beforehand."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(8, 5))

        def forward(self, x: Tensor) -> Tensor:
            return F.embedding(x[:, 0].abs().long().clamp(max=7), self.table, sparse=True)


class Disproportionate(Idiom):
    """Named losses whose counts are in another proportion in odd lanes."""

    def model(self) -> nn.Module:
        return nn.Linear(16, 5)

    def loss(self, model: nn.Module, batch: LaneBatch) -> Any:
        out = model(batch.x)
        fit = F.cross_entropy(out, batch.y, reduction="sum")
        size = (out.square().sum(), (1 + batch.lane % 2) * len(batch))
        return {"fit": (fit, len(batch)), "size": size}


class Named(Idiom):
    """Losses with names, one of them with a weight that follows the run's progress."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.2), nn.Linear(8, 5))

    def optimizers(self, model: nn.Module) -> Optimizer:
        first, last = model[0], model[2]  # type: ignore[index]
        groups: Iterable[dict[str, Any]] = [
            {"params": first.parameters(), "clip_norm": 0.05},
            {"params": last.parameters(), "clip_norm": None},
        ]
        return SGD(groups, lr=0.05)

    def loss(self, model: nn.Module, batch: LaneBatch) -> Any:
        out = model(batch.x)
        assert batch.lanes == 8
        assert batch.device == out.device
        size = self.factor(batch) * out.square().sum()
        return {"fit": (F.cross_entropy(out, batch.y, reduction="sum"), len(batch)), "size": (size, 5 * len(batch))}

    def factor(self, batch: LaneBatch) -> float:
        return batch.progress / (1 + batch.epoch)

    def on_save(self, folder: Path) -> None:
        (folder / "saved.txt").write_text("saved")

    def on_end(self, folder: Path) -> None:
        (folder / "ended.txt").write_text("ended")


class NamedAlike(Named):
    """The same weight all the time, as a CUDA graph needs it."""

    def factor(self, batch: LaneBatch) -> float:
        return 0.5
