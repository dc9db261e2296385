"""Parameters, optimizers and modules that are not the usual ones, and mistakes to be refused."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import TensorDataset

from samestep import LaneBatch, Task
from tests.sameness.models.base import CLASSES, FEATURES, Classify, Validated, mlp, points


class SpectralNorm(Classify):
    def model(self) -> nn.Module:
        first, last = nn.Linear(FEATURES, 24), nn.Linear(24, CLASSES)
        return nn.Sequential(spectral_norm(first), nn.ReLU(), spectral_norm(last))


class WeightNorm(Classify):
    def model(self) -> nn.Module:
        first, last = nn.Linear(FEATURES, 24), nn.Linear(24, CLASSES)
        return nn.Sequential(weight_norm(first), nn.ReLU(), weight_norm(last))


class Filter(nn.Module):
    """A filter with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES // 2 + 1, dtype=torch.complex64))
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.fft.irfft(torch.fft.rfft(x.float()) * self.weight, FEATURES))


class ComplexParameters(Classify):
    def model(self) -> nn.Module:
        return Filter()


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16, dtype=torch.bfloat16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.to(torch.bfloat16))).float()
        return self.third(torch.tanh(self.second(x)).double())


class MixedParameters(Classify):
    """float32, float64 and bfloat16 in one model."""

    def model(self) -> nn.Module:
        return Mixed()


class MaxNormEmbedding(Classify):
    """An embedding that shortens its vectors when they are looked up: forward changes weights."""

    def model(self) -> nn.Module:
        embed = nn.Embedding(40, 8, max_norm=1.0)
        return nn.Sequential(embed, nn.Flatten(), nn.Linear(2 * 8, CLASSES))

    def train_data(self) -> Any:
        return TensorDataset(*numbered_points())


class LazyModules(Classify):
    """Layers that learn their sizes from the first batch."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(24), nn.ReLU(), nn.LazyLinear(CLASSES))


class LayerDropNet(nn.Module):
    """Leaves out layers for a whole lane, as Python's generator decides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or random.random() > 0.5:
                x = x + torch.tanh(layer(x))
        return self.last(x)


class LayerDrop(Classify):
    def model(self) -> nn.Module:
        return LayerDropNet()


class HookNoise(Classify):
    """Gradient hooks that draw noise in the backward pass."""

    def model(self) -> nn.Module:
        model = mlp()
        for param in model.parameters():
            param.register_hook(lambda grad: grad + 0.01 * torch.randn_like(grad))
        return model


class DropoutInValidation(Validated):
    """Monte Carlo dropout: validation draws, too."""

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        logits = model(F.dropout(batch.x, 0.2))
        return F.cross_entropy(logits, batch.y, reduction="sum"), len(batch)


class Named(Validated):
    """Its optimizers and schedules are the config's; validated, for those that need it."""

    optimizers = Task.optimizers


class NamedMatrices(Named):
    """Without biases: Muon takes matrices only."""

    def model(self) -> nn.Module:
        first, last = nn.Linear(FEATURES, 24, bias=False), nn.Linear(24, CLASSES, bias=False)
        return nn.Sequential(first, nn.GELU(), last)


class Langevin(torch.optim.SGD):
    """Adds noise to the weights in each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(torch.randn_like(param), alpha=1e-3)


class OptimizerNoise(Classify):
    def optimizers(self, model: nn.Module) -> Any:
        return Langevin(model.parameters(), lr=0.05)


class ExtraModule(Validated):
    """A head besides the model, with dropout and BatchNorm, in training and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, CLASSES))

    def model(self) -> nn.Module:
        return nn.Linear(FEATURES, 8)

    def extra_modules(self) -> list[nn.Module]:
        return [self.head]

    def optimizers(self, model: nn.Module) -> Any:
        return torch.optim.SGD([*model.parameters(), *self.head.parameters()], lr=0.05)

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        logits = self.head(model(batch.x))
        return F.cross_entropy(logits, batch.y, reduction="sum"), len(batch)


class WrappedMetrics(Validated):
    """Metrics around metrics."""

    def metrics(self) -> Mapping[str, Any]:
        from torchmetrics.classification import MulticlassAccuracy
        from torchmetrics.wrappers import MinMaxMetric

        def plain() -> MulticlassAccuracy:
            return MulticlassAccuracy(CLASSES, average="micro")

        return {"plain": plain(), "extremes": MinMaxMetric(plain()), "twice": 2 * plain()}

    def evaluate(self, model: nn.Module, batch: LaneBatch, metrics: Mapping[str, Any]) -> tuple[Tensor, Any]:
        for metric in metrics.values():
            metric.update(model(batch.x), batch.y)
        return self.loss(model, batch)


def numbered_points() -> tuple[Tensor, Tensor]:
    """Two numbers below 40 for each sample."""
    x, y = points()
    return (x[:, :2].abs() * 12).long() % 40, y


class SparseGradients(Classify):
    """An embedding whose gradient is sparse."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(40, 8, sparse=True), nn.Flatten(), nn.Linear(2 * 8, CLASSES))

    def train_data(self) -> Any:
        return TensorDataset(*numbered_points())

    def optimizers(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.05)


class LBFGSByTask(Classify):
    def optimizers(self, model: nn.Module) -> Any:
        return torch.optim.LBFGS(model.parameters())


class SyncBatchNormByTask(Classify):
    def model(self) -> nn.Module:
        first, last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        return nn.Sequential(first, nn.SyncBatchNorm(8), nn.ReLU(), last)


class GradientPenalty(Classify):
    """A second derivative in the loss."""

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        x = batch.x.requires_grad_()
        logits = model(x)
        loss = F.cross_entropy(logits, batch.y, reduction="sum")
        (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return loss + slope.square().sum(), len(batch)
