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

from samestep.bench.models import GPT, ConvNet, GPTSize, mlp
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
