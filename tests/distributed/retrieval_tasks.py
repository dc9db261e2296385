"""Tasks that are judged by which samples their embeddings find."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from tests.distributed.contrastive_tasks import FEATURES, Plain

CLASSES = 7


def made_set(samples: int, seed: int, classes: int = CLASSES) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, classes, (samples,), generator=generator)
    return TensorDataset(torch.randn(samples, FEATURES, generator=generator) + centres[y], y)


class Encoder(nn.Module):
    """An encoder with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Dropout(0.3))
        self.head = nn.Linear(12, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x))


class Judged(Plain):
    """Two views from one pass; a training set in which reading adds noise, and one without."""

    def __init__(self, kind: str = "") -> None:
        self.kind = kind

    def model(self) -> nn.Module:
        return Encoder()

    def train_data(self) -> Any:
        return made_set(90, 1)

    def valid_data(self) -> Any:
        return made_set(301, 2, 1 if self.kind == "one class" else CLASSES)

    def reference_data(self, name: str) -> Any:
        if name == "train":
            return made_set(2200, 1, 1 if self.kind == "one class" else CLASSES)
        if name == "nothing":
            return None
        return [] if name == "empty" else super().reference_data(name)

    def eval_embed(self, model: nn.Module, batch: samestep.LaneBatch) -> Any:
        assert not model.training
        encoded = model.body(batch.x)
        if self.kind == "crops":
            return encoded[:, None]
        head = model.head(encoded)
        return {"head": head * 1e6 if self.kind == "huge" else head, "encoder": encoded}

    def labels(self, batch: samestep.LaneBatch) -> Any:
        if self.kind == "no pairs":
            return super().labels(samestep.LaneBatch(0, batch.x, batch.ids))
        return batch.y / 2 if self.kind == "floats" else super().labels(batch)


class NoEmbeddings(Judged):
    """An ordinary task."""

    embed = samestep.Task.embed
    eval_embed = samestep.Task.eval_embed


class Gathered(Judged):
    """A metric of its own, over the whole validation set."""

    def eval_outputs(self, model: nn.Module, batch: samestep.LaneBatch) -> Any:
        rows = model(batch.x)
        if self.kind == "short":
            return rows[1:]
        return {"rows": rows, "y": batch.y, "ids": torch.tensor(batch.ids)}

    def evaluate_gathered(self, outputs: Any) -> Any:
        assert outputs["ids"].tolist() == list(range(301)), "in the order of the dataset"
        if self.kind == "nothing":
            return {}
        noisy = outputs["rows"] + 0.01 * torch.randn(outputs["rows"].shape)
        return {"spread": noisy.std().item(), "by": {"mean": noisy.mean(0)}}
