"""The comparison of peers.py: two workloads, and what every contestant gets of them.

An MLP of 4 layers, 256 wide, at batch 128 in fp32; and a GPT of 12 layers, 768 wide, at 16x512
tokens in bf16 by autocast, with torch's scaled_dot_product_attention, a vocabulary of 8192 and a
separate head (not tied to the embedding). Both can be learned, so that the losses show whether all
contestants trained the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from overhead import mlp
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset

SEED = 0
LOG_EVERY = 10
CLIP = 1.0


class HostData(Dataset[Any]):
    """Tensors in host memory that return a whole batch at once: loading costs the same for all."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        picked = torch.as_tensor(indices)
        return tuple(tensor.index_select(0, picked) for tensor in self.tensors)


def collate_nothing(batch: Any) -> Any:
    """A collate function for batches that are already collated."""
    return batch


class Learner(nn.Module):
    """A network with its loss inside, as the HF Trainer needs it; all contestants use it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        logits = self.network(x)
        return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction=reduction)


@dataclass(frozen=True)
class GPTSize:
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


@dataclass(frozen=True)
class Workload:
    """A model with its data."""

    name: str
    batch: int
    steps: int
    """Steps in a round; must be a multiple of LOG_EVERY."""
    epoch_steps: int
    precision: str
    rate: float
    graph_goal: float
    network: Callable[[float], nn.Module]
    """Takes the dropout probability."""
    data: Callable[[int], HostData]
    """Takes the number of samples."""


def workload_of(key: str, quick: bool) -> Workload:
    return mlp_workload(quick) if key == "mlp" else gpt_workload(quick)


def mlp_workload(quick: bool) -> Workload:
    def vectors(samples: int) -> HostData:
        x = torch.randn(samples, 256)
        return HostData(x, (x @ torch.randn(256, 10)).argmax(1))

    return Workload(
        "MLP 4x256, batch 128, fp32", 128, 10 if quick else 200, 25 if quick else 400,
        "fp32", 1e-3, 1.15, lambda dropout: mlp(4, 256), vectors,
    )  # fmt: skip


def gpt_workload(quick: bool) -> Workload:
    size = GPTSize(2, 16, 2, 2, 8, 64) if quick else GPTSize(12, 768, 12, 16, 512, 8192)

    def texts(samples: int) -> HostData:
        # Low numbers are more frequent than high ones, which a model can learn quickly.
        text = (torch.rand(samples, size.tokens + 1) ** 4 * size.vocabulary).long()
        return HostData(text[:, :-1].contiguous(), text[:, 1:].contiguous())

    return Workload(
        f"GPT {size.layers}x{size.width}, {size.batch}x{size.tokens} tokens, bf16", size.batch,
        10, 25 if quick else 400, "bf16", 3e-4, 1.03, lambda dropout: GPT(size, dropout),
        texts,
    )  # fmt: skip


@dataclass(frozen=True)
class Contest:
    """What all contestants share."""

    workload: Workload
    device: torch.device
    fused: bool
    dataset: HostData
    initial: nn.Module

    def model(self) -> nn.Module:
        return deepcopy(self.initial).to(self.device)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.workload.rate, fused=self.fused or None)

    def loader(self) -> DataLoader[Any]:
        return DataLoader(
            self.dataset,
            batch_size=self.workload.batch,
            collate_fn=collate_nothing,
            pin_memory=self.on_gpu,
            drop_last=True,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        if self.workload.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def open_contest(workload: Workload, device: torch.device, fused: bool, dropout: float) -> Contest:
    torch.manual_seed(SEED)
    dataset = workload.data(workload.batch * workload.epoch_steps)
    return Contest(workload, device, fused, dataset, Learner(workload.network(dropout)))
