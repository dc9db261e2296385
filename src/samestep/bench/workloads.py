"""Built-in tasks to measure with: three networks in three sizes, on data in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import Dataset

from samestep.data.batch import LaneBatch
from samestep.train.task import Task

_STEPS = 64
"""Steps of an epoch at most, and of data in memory."""
_MOST_BYTES = 1 << 28
_CLASSES = 10
_SEED = 20


class HostData(Dataset[Any]):
    """Tensors in host memory that return a whole batch at once: loading costs the same for all."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return several samples, already collated."""
        picked = torch.as_tensor(indices)
        return tuple(tensor.index_select(0, picked) for tensor in self.tensors)


def collate_nothing(batch: Any) -> Any:
    """Return a collate function for batches that are already collated."""
    return batch


@dataclass(frozen=True)
class Workload:
    """A network with its data."""

    batch: int
    """Samples of a lane."""
    sample_bytes: int
    network: Callable[[], nn.Module]
    data: Callable[[int], HostData]
    """Takes the number of samples."""


def workload_of(name: str, size: str) -> Workload:
    """Return a built-in workload."""
    return _WORKLOADS[name](("small", "medium", "large").index(size))


def _mlp(size: int) -> Workload:
    layers, width, batch = ((4, 256, 128), (6, 1024, 256), (8, 4096, 512))[size]

    def vectors(samples: int) -> HostData:
        return HostData(torch.randn(samples, width), torch.randint(_CLASSES, (samples,)))

    return Workload(batch, 4 * width, lambda: mlp(layers, width), vectors)


def _conv(size: int) -> Workload:
    stages, batch, side = (((16, 32), 16, 16), ((64, 128, 256), 64, 32), ((64, 128, 256, 512), 256, 32))[size]

    def images(samples: int) -> HostData:
        return HostData(torch.randn(samples, 3, side, side), torch.randint(_CLASSES, (samples,)))

    return Workload(batch, 12 * side**2, lambda: ConvNet(stages), images)


def _transformer(size: int) -> Workload:
    sizes = (GPTSize(2, 128, 4, 4, 32, 256), GPTSize(12, 768, 12, 16, 512, 8192), GPTSize(24, 1024, 16, 8, 1024, 32768))
    found = sizes[size]

    def texts(samples: int) -> HostData:
        text = torch.randint(found.vocabulary, (samples, found.tokens + 1))
        return HostData(text[:, :-1].contiguous(), text[:, 1:].contiguous())

    return Workload(found.batch, 16 * found.tokens, lambda: GPT(found, 0.0), texts)


_WORKLOADS: dict[str, Callable[[int], Workload]] = {"mlp": _mlp, "conv": _conv, "transformer": _transformer}


class WorkloadTask(Task):
    """A built-in workload as a task."""

    def __init__(self, workload: Workload, global_batch: int) -> None:
        self._workload = workload
        fitting = _MOST_BYTES // (workload.sample_bytes * global_batch)
        self._samples = global_batch * max(2, min(_STEPS, fitting))

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            return self._workload.network()

    def train_data(self) -> HostData:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            return self._workload.data(self._samples)

    def collate(self, samples: Any) -> Any:
        return collate_nothing(samples)

    def optimizers(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-4, fused=torch.cuda.is_available() or None)

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, float]:
        logits = model(batch.x)
        loss = F.cross_entropy(logits.flatten(0, -2), batch.y.flatten(), reduction="sum")
        return loss, batch.y.numel()


class NamedWorkload(WorkloadTask):
    """A built-in workload that a config names."""

    def __init__(self, workload: str, size: str, global_batch: int) -> None:
        super().__init__(workload_of(workload, size), global_batch)


def mlp(layers: int, width: int, classes: int = 10) -> nn.Module:
    """Linear layers with ReLU between them."""
    hidden = [m for _ in range(layers - 1) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, classes))


@dataclass(frozen=True)
class GPTSize:
    """Sizes of a GPT and of its batch."""

    layers: int
    width: int
    heads: int
    batch: int
    tokens: int
    vocabulary: int


class Block(nn.Module):
    """One layer of the GPT: attention, then an MLP, each after a norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._drop(self._attend(self.attention_norm(hidden)))
        return hidden + self._drop(self.perceptron(self.perceptron_norm(hidden)))

    def _attend(self, hidden: Tensor) -> Tensor:
        qkv = self.qkv(hidden).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        chance = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=chance, is_causal=True)
        attended: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return attended

    def _drop(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, self.dropout, self.training) if self.dropout else hidden


class GPT(nn.Module):
    """A causal language model like GPT-2."""

    def __init__(self, size: GPTSize, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Parameter(0.02 * torch.randn(size.tokens, size.width))
        blocks = (Block(size.width, size.heads, dropout) for _ in range(size.layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm, and a way around them."""

    def __init__(self, inward: int, outward: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *normed_convolution(inward, outward, stride), nn.ReLU(), *normed_convolution(outward, outward)
        )
        same = inward == outward and stride == 1
        around = () if same else normed_convolution(inward, outward, stride, kernel=1)
        self.around = nn.Sequential(*around)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.relu(self.convolutions(hidden) + self.around(hidden))


def normed_convolution(inward: int, outward: int, stride: int = 1, kernel: int = 3) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(inward, outward, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(outward)


class ConvNet(nn.Module):
    """A residual network for small images; with stages of 64, 128, 256, 512: ResNet-18."""

    def __init__(self, stages: Sequence[int], classes: int = 10) -> None:
        super().__init__()
        blocks: list[nn.Module] = [*normed_convolution(3, stages[0]), nn.ReLU()]
        before = stages[0]
        for number, width in enumerate(stages):
            blocks.append(ResidualBlock(before, width, stride=1 if number == 0 else 2))
            blocks.append(ResidualBlock(width, width, stride=1))
            before = width
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        # torch's pooling to one pixel has no deterministic backward pass on GPUs; a mean has.
        logits: Tensor = self.head(self.blocks(images).mean((2, 3)))
        return logits
