"""The workload of contrastive.py: a transformer that embeds patches, and where variants run it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contest import SEED
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader
from variants import repeat_forever

from samestep.bench.workloads import Block, HostData, collate_nothing
from samestep.losses import supcon


@dataclass(frozen=True)
class Size:
    """The model and its data."""

    layers: int
    width: int
    heads: int
    tokens: int
    features: int
    embedding: int
    held: int
    """Samples in memory, of which an endless dataset is made."""
    classes: int = 32


CPU_SIZE = Size(2, 64, 4, 16, 24, 32, held=1024)
GPU_SIZE = Size(6, 384, 6, 64, 48, 128, held=16384)


class Encoder(nn.Module):
    """A transformer over patches, whose outputs' mean is the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.patches = nn.Linear(size.features, size.width)
        self.position = nn.Parameter(0.02 * torch.randn(size.tokens, size.width))
        self.blocks = nn.Sequential(*(Block(size.width, size.heads, 0.0) for _ in range(size.layers)))
        self.head = nn.Linear(size.width, size.embedding)

    def forward(self, patches: Tensor) -> Tensor:
        hidden = self.patches(patches.float() / 255) + self.position
        embeddings: Tensor = self.head(self.blocks(hidden).mean(1))
        return embeddings


class Images(HostData):
    """Patches as bytes, of a pattern for each class, over and over."""

    def __init__(self, size: Size, samples: int) -> None:
        classes = torch.randint(size.classes, (size.held,))
        patterns = torch.randint(128, (size.classes, size.tokens, size.features))
        noise = torch.randint(128, (size.held, size.tokens, size.features))
        super().__init__((patterns[classes] + noise).byte(), classes)
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        picked = torch.as_tensor(indices) % len(self.tensors[0])
        return tuple(tensor.index_select(0, picked) for tensor in self.tensors)


@dataclass(frozen=True)
class Place:
    """The place, and the number of samples, that variants run with."""

    world: int
    device: torch.device
    batch: int
    """Samples of a step, on all ranks."""
    lane: int
    """Samples of a lane, of which a rank has several."""
    steps: int
    """In a turn."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def size(self) -> Size:
        return GPU_SIZE if self.on_gpu else CPU_SIZE

    @property
    def own(self) -> range:
        """Which samples of a step are this rank's."""
        each, rank = self.batch // self.world, dist.get_rank() if self.world > 1 else 0
        return range(rank * each, (rank + 1) * each)


class Scene:
    """The settings that all variants of a place share."""

    def __init__(self, place: Place, stack: ExitStack) -> None:
        torch.manual_seed(SEED)
        self.place = place
        self.dataset = Images(place.size, 1000 * place.batch)
        self._initial = Encoder(place.size)
        folder = [stack.enter_context(tempfile.TemporaryDirectory(prefix="samestep-contrast-"))]
        if place.world > 1:
            dist.broadcast_object_list(folder)  # all ranks of a run share rank 0's directory
        self.folder = Path(folder[0])

    def model(self) -> nn.Module:
        return deepcopy(self._initial).to(self.place.device)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-3, fused=self.place.on_gpu or None)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.place.on_gpu else nullcontext()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of every step, on its device."""
        place = self.place
        starts = range(0, len(self.dataset), place.batch)
        loader: DataLoader[Any] = DataLoader(
            self.dataset,
            batch_sampler=[[start + number for number in place.own] for start in starts],
            collate_fn=collate_nothing,
            pin_memory=place.on_gpu,
        )
        for batch in repeat_forever(loader):
            x, y = (tensor.to(place.device, non_blocking=True) for tensor in batch)
            yield x, y

    def loss(self, model: nn.Module) -> float:
        """Return the whole batch's loss by these weights."""
        x, y = (t.to(self.place.device) for t in self.dataset.__getitems__(range(self.place.batch)))
        with torch.no_grad(), self.autocast():
            rows = [model(part) for part in x.split(self.place.lane)]
        return supcon(torch.cat(rows).float(), y).item()
