"""Tasks whose loss is over the whole global batch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import samestep
from samestep.losses import contrastive

SAMPLES, FEATURES, CLASSES, SIZE = 90, 6, 4, 5


def made_data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    y = torch.arange(samples) % CLASSES
    x = torch.randn(samples, FEATURES, generator=generator) + y[:, None]
    return TensorDataset(x, y)


class Plain(samestep.Task):
    """SupCon with nothing that depends on how the batch is cut."""

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, SIZE))

    def train_data(self) -> Any:
        return made_data()

    def order(self, dataset: Any) -> Any:
        return samestep.orders.sequential(len(dataset))

    def optimizers(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def embed(self, model: nn.Module, batch: samestep.LaneBatch) -> Any:
        return model(batch.x)

    def batch_loss(self, embeddings: Any, batch: Any) -> Any:
        return samestep.losses.supcon(embeddings, batch.y, temperature=0.2)


class Views(Plain):
    """Two noisy views of each sample, BatchNorm, dropout, a loss that draws."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, SIZE)
        )

    def order(self, dataset: Any) -> Any:
        return None

    def optimizers(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def embed(self, model: nn.Module, batch: samestep.LaneBatch) -> Any:
        views = torch.cat([batch.x + 0.1 * torch.randn_like(batch.x) for _ in range(2)])
        return model(views).unflatten(0, (2, -1)).transpose(0, 1)

    def batch_loss(self, embeddings: Any, batch: Any) -> Any:
        assert len(batch) == len(batch.y)
        noise = 0.01 * torch.randn_like(embeddings)
        return samestep.losses.supcon(embeddings + noise, batch.y, 0.2, rows_at_once=7)


class Proxies(nn.Module):
    """A loss with weights of its own, one row for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(CLASSES, SIZE))

    def forward(self, embeddings: Tensor, y: Tensor) -> Tensor:
        similar = F.normalize(embeddings, dim=1) @ F.normalize(self.rows, dim=1).T
        return F.cross_entropy(5 * similar, y, reduction="sum")


class WithProxies(Views):
    """Two optimizers, and a sum with its count; embeddings of two towers in a mapping."""

    def __init__(self) -> None:
        self.proxies = Proxies()

    def extra_modules(self) -> Any:
        return [self.proxies]

    def optimizers(self, model: nn.Module) -> Any:
        own = torch.optim.SGD(self.proxies.parameters(), lr=0.05)
        return [torch.optim.AdamW(model.parameters(), lr=1e-2), own]

    def embed(self, model: nn.Module, batch: samestep.LaneBatch) -> Any:
        return {"left": model(batch.x), "right": model(batch.x.flip(1))}

    def batch_loss(self, embeddings: Any, batch: Any) -> Any:
        left, right = embeddings["left"], embeddings["right"]
        together = samestep.losses.clip(left, right, 4.0) * len(batch)
        return self.proxies(left, batch.y) + together, len(batch)


class Shared(Views):
    """Rows of all losses are distributed; of two of them, a parameter is trained."""

    def __init__(self) -> None:
        self.scales = nn.ParameterList([torch.tensor(3.0), torch.tensor(-1.0)])

    def extra_modules(self) -> Any:
        return [self.scales]

    def optimizers(self, model: nn.Module) -> Any:
        return torch.optim.AdamW([*model.parameters(), *self.scales.parameters()], lr=1e-2)

    def batch_loss(self, embeddings: Any, batch: Any) -> Any:
        left, right = embeddings.unbind(1)
        scale, bias = self.scales
        with mock.patch.object(contrastive, "SHARED_FROM", 60):  # all but the tails
            found = [
                samestep.losses.supcon(embeddings, batch.y, 0.2, rows_at_once=7),
                samestep.losses.nt_xent(embeddings),
            ]
        with mock.patch.object(contrastive, "SHARED_FROM", 5):  # in a tail some lanes have no row
            found += [samestep.losses.clip(left, right, scale), samestep.losses.siglip(left, right, scale, bias)]
        return torch.stack(found).sum()


class Queue(nn.Module):
    """The last embeddings and their classes."""

    def __init__(self, length: int = 50) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(length, SIZE))
        self.register_buffer("classes", torch.full((length,), -1))
        self.norm = nn.BatchNorm1d(SIZE)

    @torch.no_grad()
    def push(self, rows: Tensor, classes: Tensor) -> None:
        length = len(self.rows)
        self.rows.copy_(torch.cat([rows, self.rows])[:length])
        self.classes = torch.cat([classes, self.classes])[:length]


class WithQueue(Views):
    """A contrast with what earlier steps have embedded; BatchNorm over the whole batch."""

    def __init__(self) -> None:
        self.queue = Queue()

    def extra_modules(self) -> Any:
        return [self.queue]

    def embed(self, model: nn.Module, batch: samestep.LaneBatch) -> Any:
        return model(batch.x)

    def batch_loss(self, embeddings: Any, batch: Any) -> Any:
        z = F.normalize(self.queue.norm(embeddings), dim=1)
        every = torch.cat([z, self.queue.rows.clone()])
        classes = torch.cat([batch.y, self.queue.classes])
        similar = (z @ every.T / 0.2).log_softmax(1)
        loss = -similar[classes == batch.y[:, None]].mean()
        self.queue.push(z, batch.y)
        return loss


class Wrong(Plain):
    """Does what it is asked to."""

    def __init__(self, kind: str) -> None:
        self.kind, self.norm = kind, nn.BatchNorm1d(SIZE)

    def model(self) -> nn.Module:
        return nn.Sequential(super().model(), self.norm)

    def embed(self, model: nn.Module, batch: samestep.LaneBatch) -> Any:
        made = model(batch.x)
        return {"rows": made[1:], "texts": ["a"] * len(made), "detached": made.detach()}.get(self.kind, made)

    def batch_loss(self, embeddings: Any, batch: Any) -> Any:
        if self.kind == "labels":
            return samestep.losses.supcon(embeddings, batch.y[1:])
        if self.kind == "buffers":
            self.norm.running_mean += 1
        if self.kind == "vector":
            return embeddings.sum(1)
        if self.kind == "names":
            return {"a": (embeddings.sum(), 1)}
        return super().batch_loss(embeddings, batch)


class ArcFace(Views):
    """A loss and a miner of another library, as they are; the loss has weights."""

    def __init__(self) -> None:
        from pytorch_metric_learning import losses, miners

        self.arcface = losses.ArcFaceLoss(CLASSES, SIZE)
        self.similar = losses.MultiSimilarityLoss()
        self.miner = miners.MultiSimilarityMiner()

    def extra_modules(self) -> Any:
        return [self.arcface]

    def optimizers(self, model: nn.Module) -> Any:
        own = torch.optim.SGD(self.arcface.parameters(), lr=0.05)
        return [torch.optim.AdamW(model.parameters(), lr=1e-2), own]

    def embed(self, model: nn.Module, batch: samestep.LaneBatch) -> Any:
        return model(batch.x)

    def batch_loss(self, embeddings: Any, batch: Any) -> Any:
        hard = self.miner(embeddings, batch.y)
        return self.arcface(embeddings, batch.y) + self.similar(embeddings, batch.y, hard)
