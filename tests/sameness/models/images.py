"""Models of pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from samestep import LaneBatch, Task
from tests.distributed import tasks
from tests.sameness.models.base import CLASSES, Pictures, pictures


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.3)
        self.hidden = nn.Linear(6 * 16, 16)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).flatten(1)
        return self.last(self.drop(F.relu(self.hidden(x))))


class Convolutions(Pictures):
    """With BatchNorm, dropout, validation and metrics."""

    def model(self) -> nn.Module:
        return ConvNet()

    def valid_data(self) -> Any:
        return TensorDataset(*pictures(37, seed=5))

    def metrics(self) -> Mapping[str, Any]:
        from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

        return {"f1": MulticlassF1Score(CLASSES), "auroc": MulticlassAUROC(CLASSES)}

    def evaluate(self, model: nn.Module, batch: LaneBatch, metrics: Mapping[str, Any]) -> tuple[Tensor, Any]:
        logits = model(batch.x)
        for metric in metrics.values():
            metric.update(logits.float().softmax(1), batch.y)
        return F.cross_entropy(logits, batch.y, reduction="sum"), len(batch)


class NamedConvolutions(Convolutions):
    """Its optimizers and schedules are the config's."""

    optimizers = Task.optimizers


class Overflowing(Convolutions):
    """One sample, and so one lane of one rank once an epoch, overflows in backward."""

    sample, loss = 17, tasks.Overflowing.loss


class DropPath(nn.Module):
    """Leaves out a branch for some samples."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand(len(x), 1, 1, device=x.device) >= self.share
        return x * kept / (1 - self.share)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop = DropPath(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.drop(self.attention(y, y, y, need_weights=False)[0])
        return x + self.drop(self.mlp(self.between(x)))


class ViT(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.blocks(x)[:, 0])


class VisionTransformer(Pictures):
    """With drop-path in the model and mixup in the loss, both drawn from the lane's stream."""

    def model(self) -> nn.Module:
        return ViT()

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        share = torch.distributions.Beta(0.4, 0.4).sample().to(batch.x.device)
        other = torch.randperm(len(batch), device=batch.x.device)
        logits = model(share * batch.x + (1 - share) * batch.x[other])
        losses = F.cross_entropy(logits, batch.y, reduction="sum")
        others = F.cross_entropy(logits, batch.y[other], reduction="sum")
        return share * losses + (1 - share) * others, len(batch)


def _convolutions(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(2, outside), nn.SiLU())


class UNetModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom = _convolutions(1, 4), _convolutions(4, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Sequential(_convolutions(8, 4), nn.Conv2d(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        deep = self.bottom(F.avg_pool2d(skip, 2))
        return self.out(torch.cat([skip, self.up(deep)], 1))


class UNet(Pictures):
    """Removes noise that the loss draws; counts pixels."""

    def model(self) -> nn.Module:
        return UNetModel()

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        noise = torch.randn_like(batch.x)
        found = model(batch.x + noise)
        return F.mse_loss(found, noise, reduction="sum"), noise.numel()
