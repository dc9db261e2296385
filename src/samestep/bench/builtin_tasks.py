"""The training that is measured if no config is given; it has everything that a training can have."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep.data.batch import LaneBatch
from samestep.train.task import Task

_CLASSES = 10


class Mlp(Task):
    """A perceptron with BatchNorm on random numbers."""

    def __init__(self, width: int = 256, samples: int = 4096) -> None:
        self._width, self._samples = width, samples

    def model(self) -> nn.Module:
        width = self._width
        return nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.BatchNorm1d(4 * width),
            nn.ReLU(),
            nn.Linear(4 * width, width),
            nn.ReLU(),
            nn.Linear(width, _CLASSES),
        )

    def train_data(self) -> TensorDataset:
        drawn = torch.Generator().manual_seed(0)
        x = torch.randn(self._samples, self._width, generator=drawn)
        return TensorDataset(x, torch.randint(0, _CLASSES, (self._samples,), generator=drawn))

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch)
