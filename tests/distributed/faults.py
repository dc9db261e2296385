"""Planted faults: each makes a run depend on its ranks, or on being stopped, in one known place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep import LaneBatch, orders
from tests.distributed.tasks import Everything, Net, Noisy, rank


class _Faulty(nn.Module):
    """Something that changes a layer's output, between two layers of a model."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor(x)

    def factor(self, x: Tensor) -> Any:
        raise NotImplementedError


class SeededByRank(_Faulty):
    """A draw from a generator that the rank seeds."""

    def factor(self, x: Tensor) -> Any:
        generator = torch.Generator().manual_seed(rank())
        return 1 + 0.01 * torch.randn(x.shape, generator=generator)


class RankBuffer(_Faulty):
    """A buffer that counts with the rank, and changes nothing but itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def factor(self, x: Tensor) -> Any:
        self.seen.add_(1.0 + rank())
        return 1


class _WithFault(Everything):
    """`model.2` is the fault."""

    fault: type[nn.Module]

    def model(self) -> nn.Module:
        net = Net(0.0)
        return nn.Sequential(net.conv, net.norm, self.fault(), nn.Flatten(), net.hidden, net.last)

    def valid_data(self) -> Any:
        return None


class RankSeededDraw(_WithFault):
    fault = SeededByRank


class RankDependentBuffer(_WithFault):
    fault = RankBuffer


class LaneGenerators(Everything):
    """A generator for each lane that lives as long as the task: the same at any size, but a
    resumed run begins it anew."""

    def __init__(self) -> None:
        super().__init__()
        self.generators: dict[int, torch.Generator] = {}

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        own = self.generators.setdefault(batch.lane, torch.Generator().manual_seed(batch.lane))
        noise = torch.randn(batch.x.shape, generator=own)
        return F.cross_entropy(model(batch.x + 0.1 * noise), batch.y, reduction="sum"), len(batch)


class RankDependentOrder(Everything):
    """Every rank visits the samples in its own order."""

    def order(self, dataset: Any) -> Any:
        weights = torch.ones(len(dataset)) + 10 * rank() * (torch.arange(len(dataset)) % 2)
        return orders.weighted(weights.tolist())


class NoisyLabels(Everything):
    """The data of a sample depends on the rank that reads it."""

    def train_data(self) -> Any:
        class Shifted(Noisy):
            def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
                x, y = super().__getitem__(index)
                return x, (y + rank()) % 4

        return Shifted(self.samples)


class NoisySGD(torch.optim.SGD):
    """Adds noise from a generator of its own, which the rank seeds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.generator = torch.Generator().manual_seed(rank())

    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                noise = torch.randn(param.shape, generator=self.generator)
                param.data.add_(noise, alpha=1e-4)
        return done


class OptimizerNoise(Everything):
    def optimizers(self, model: nn.Module) -> Any:
        return NoisySGD(model.parameters(), lr=0.05)
