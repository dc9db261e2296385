"""Tasks with something wrong that `samestep bench` has to find."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import samestep
from samestep import LaneBatch


class Plain(samestep.Task):
    """Nothing is wrong with it."""

    def model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def train_data(self) -> Any:
        return TensorDataset(torch.zeros(16, 4), torch.zeros(16, 2))

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        return (model(batch.x) - batch.y).square().sum(), len(batch)


class Late(Plain):
    """Rank 1 sleeps in every lane."""

    def train_data(self) -> Any:
        return TensorDataset(torch.randn(96, 4), torch.randn(96, 2))

    def optimizers(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        if os.environ.get("RANK") == "1":
            time.sleep(0.1)
        return super().loss(model, batch)


class Leaking(Plain):
    """Keeps a tensor of every step, on one rank."""

    def __init__(self, rank: int = 0, kilobytes: int = 64) -> None:
        self._leaks, self._numbers = rank, kilobytes * 256
        self._kept: list[Tensor] = []

    def listeners(self, run: samestep.Run) -> list[samestep.RunListener]:
        # What torch remembers of collectives grows, too, and must not be there.
        assert os.environ["TORCH_FR_BUFFER_SIZE"] == "0"
        self._leaks = self._leaks if run.rank == self._leaks else -1
        return []

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        if self._leaks >= 0:
            self._kept.append(torch.ones(self._numbers))
        return super().loss(model, batch)
