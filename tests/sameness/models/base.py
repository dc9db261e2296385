"""What the other modules build on: made-up data, and a task that only needs another model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from samestep import LaneBatch, Task

CLASSES = 5
FEATURES = 16
SAMPLES = 90
"""With a global batch of 32: two whole steps, and a tail of 26 samples that leaves lanes empty."""


def points(samples: int = SAMPLES, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Vectors, and the class of each."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator)
    return x, (x.sum(1).abs() * 2).long() % CLASSES


def pictures(samples: int = SAMPLES, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Pictures of 8 by 8 in one colour, and the class of each."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 1, 8, 8, generator=generator)
    return x, (x.sum((1, 2, 3)).abs() / 2).long() % CLASSES


def sentences(samples: int = SAMPLES, words: int = 23, shortest: int = 3) -> list[Tensor]:
    """Word numbers from 1 on, of different lengths."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(shortest, 12, (samples,), generator=generator).tolist()
    return [torch.randint(1, words, (length,), generator=generator) for length in lengths]


def mlp(hidden: int = 24) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, hidden), nn.GELU(), nn.Linear(hidden, CLASSES))


class Classify(Task):
    """Classifies points by a small network; subclasses replace what they are about."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def model(self) -> nn.Module:
        return mlp()

    def train_data(self) -> Any:
        return TensorDataset(*points(self.samples))

    def optimizers(self, model: nn.Module) -> Any:
        trained = [param for param in model.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2)

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        return F.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch)


class Validated(Classify):
    """With a validation set."""

    def valid_data(self) -> Any:
        return TensorDataset(*points(37, seed=9))


class Pictures(Classify):
    """The same for pictures."""

    def train_data(self) -> Any:
        return TensorDataset(*pictures(self.samples))
