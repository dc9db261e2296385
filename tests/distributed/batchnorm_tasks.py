"""Tasks with BatchNorm, and the loops over the whole batch that they are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import samestep

SAMPLES, BATCH, CLASSES = 68, 24, 3
"""The rest of an epoch, 20 samples, fills a part of each of 2 and of 4 lanes."""


def made_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    y = torch.arange(SAMPLES) % CLASSES
    x = torch.randn(SAMPLES, 2, 4, 4, generator=generator)
    return TensorDataset(x + 20 + y[:, None, None, None], y)


def made_model(drops: float = 0.0) -> nn.Sequential:
    """All kinds of layers; the mean of what the first one sees is large."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.BatchNorm2d(2),
            nn.Conv2d(2, 6, 3, bias=False),
            nn.BatchNorm2d(6, momentum=None),
            nn.Tanh(),
            nn.Flatten(2),
            nn.BatchNorm1d(6, affine=False),
            nn.Flatten(1),
            nn.Linear(24, 8),
            nn.BatchNorm1d(8, track_running_stats=False),
            nn.Dropout(drops),
            nn.Linear(8, CLASSES),
        )


class Images(samestep.Task):
    """Classes of images, in their own order."""

    def model(self) -> nn.Module:
        return made_model()

    def train_data(self) -> Any:
        return made_data()

    def valid_data(self) -> Any:
        return made_data()

    def order(self, dataset: Any) -> Any:
        return samestep.orders.sequential(len(dataset))

    def optimizers(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def loss(self, model: nn.Module, batch: samestep.LaneBatch) -> Any:
        return F.cross_entropy(model(batch.x), batch.y, reduction="sum"), batch.size


class Everything(Images):
    """Dropout, clipping in the config, a weight that is computed from others, a penalty, losses with names."""

    def model(self) -> nn.Module:
        model = made_model(drops=0.3)
        model[7] = nn.utils.parametrizations.weight_norm(nn.Linear(24, 8))
        return model

    def loss(self, model: nn.Module, batch: samestep.LaneBatch) -> Any:
        noise = torch.randn_like(batch.x)
        logits = model(batch.x + 0.1 * noise)
        return {
            "class": (F.cross_entropy(logits, batch.y, reduction="sum"), batch.size),
            "small": (logits.square().sum() + batch.size * model[1].weight.square().sum(), batch.size),
        }


class Head(nn.Module):
    """Normalises over all embeddings, which are on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CLASSES)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return samestep.losses.supcon(self.norm(z), y, temperature=0.5)


class Contrast(Images):
    """A loss over the whole batch, with BatchNorm in the lanes and in the loss."""

    def __init__(self) -> None:
        self.head = Head()

    def valid_data(self) -> Any:
        return None

    def extra_modules(self) -> Any:
        return [self.head]

    def optimizers(self, model: nn.Module) -> Any:
        return torch.optim.SGD([*model.parameters(), *self.head.parameters()], lr=0.02)

    def embed(self, model: nn.Module, batch: samestep.LaneBatch) -> Any:
        return model(batch.x)

    def batch_loss(self, embeddings: Any, batch: Any) -> Any:
        return self.head(embeddings, batch.y)

    loss = samestep.Task.loss


class UnevenStreams:
    """The last lane has two steps' samples more than the others."""

    def lane_stream(self, lane: int, lanes: int, seed: int, epoch: int) -> Iterator[Any]:
        data = made_data()
        for at in range(48 if lane == lanes - 1 else 24):
            yield data[(lane + lanes * at) % SAMPLES]


class Streams(Images):
    """Lanes that end at different steps."""

    def train_data(self) -> Any:
        return UnevenStreams()

    def order(self, dataset: Any) -> Any:
        return None


class _Own(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class OwnForward(Images):
    """A layer that does more than BatchNorm."""

    def model(self) -> nn.Module:
        model = made_model()
        model[0] = _Own(2)
        return model


class Counts(Images):
    """Counts by len(batch)."""

    def loss(self, model: nn.Module, batch: samestep.LaneBatch) -> Any:
        return F.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch)


class Gradients(Images):
    """A penalty on gradients inside of the graph."""

    def loss(self, model: nn.Module, batch: samestep.LaneBatch) -> Any:
        x = batch.x.requires_grad_()
        [grad] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return F.cross_entropy(model(x), batch.y) + grad.square().mean()


class Broken(Images):
    """Two steps have a value that is not finite."""

    def train_data(self) -> Any:
        x, y = made_data().tensors
        x[BATCH] = torch.inf
        return TensorDataset(x, y)


class WithoutNorm(Images):
    """Nothing normalises."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(32, CLASSES))
