"""The comparison of peers.py and lanes.py: workloads, and what every variant gets of them.

An MLP of 4 layers, 256 wide, at batch 128 in fp32; a residual network of convolutions and BatchNorm
at 256 images; and a GPT of 12 layers, 768 wide, at 16x512 tokens and at 128x512, with torch's
scaled_dot_product_attention, a vocabulary of 8192 and a separate head (not tied to the embedding);
the latter two in bf16 by autocast. All can be learned, so that the losses show whether all
variants trained the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader

from samestep.bench.workloads import GPT, ConvNet, GPTSize, HostData, collate_nothing, mlp

SEED = 0
LOG_EVERY = 10
CLIP = 1.0


class Learner(nn.Module):
    """A network with its loss inside, as the HF Trainer needs it; all variants use it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        logits = self.network(x)
        return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction=reduction)


@dataclass(frozen=True)
class Goals:
    """The most that a step of samestep may take, as ratios."""

    default: float
    """With everything default (8 lanes), to the hand-written loop."""
    graph: float
    """With one lane as a CUDA graph, to the bare graph."""
    eager: float
    """With one lane without a graph, to the hand-written loop."""
    loop: float
    """The hand-written loop on a run with everything default, to itself without."""
    one_loop: float
    """The same with one lane."""


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
    goals: Goals
    network: Callable[[float], nn.Module]
    """Takes the dropout probability."""
    data: Callable[[int], HostData]
    """Takes the number of samples."""
    together: int = 100
    """The most variants of samestep that fit into one GPU's memory, besides the hand-written ones."""
    comparable: bool = True
    """Whether lanes have the losses of the whole batch: BatchNorm normalizes each by itself."""


def workload_of(key: str, quick: bool) -> Workload:
    return WORKLOADS[key](quick)


def mlp_workload(quick: bool) -> Workload:
    def vectors(samples: int) -> HostData:
        x = torch.randn(samples, 256)
        return HostData(x, (x @ torch.randn(256, 10)).argmax(1))

    return Workload(
        "MLP 4x256, batch 128, fp32", 128, 10 if quick else 200, 25 if quick else 400,
        "fp32", 1e-3, Goals(0.35, 1.05, 1.03, 1.2, 0.8), lambda dropout: mlp(4, 256), vectors,
    )  # fmt: skip


def conv_workload(quick: bool) -> Workload:
    stages, batch, side = ((4, 8), 16, 8) if quick else ((64, 128, 256, 512), 256, 32)

    def images(samples: int) -> HostData:
        x = torch.randn(samples, 3, side, side)
        return HostData(x, (x.flatten(1)[:, :64] @ torch.randn(64, 10)).argmax(1))

    return Workload(
        f"conv + BatchNorm {'-'.join(map(str, stages))}, {batch} images, bf16", batch,
        10 if quick else 20, 25 if quick else 60, "bf16", 1e-3, Goals(0.6, 1.02, 1.02, 0.6, 0.9),
        lambda dropout: ConvNet(stages), images, comparable=False,
    )  # fmt: skip


def gpt_workload(quick: bool) -> Workload:
    return sized_gpt(GPTSize(2, 16, 2, 8, 8, 64) if quick else GPTSize(12, 768, 12, 16, 512, 8192))


def large_gpt_workload(quick: bool) -> Workload:
    """Return the same model with so large a batch that an eighth of it fills the GPU."""
    size = GPTSize(2, 16, 2, 16, 8, 64) if quick else GPTSize(12, 768, 12, 128, 512, 8192)
    # A graph keeps the memory of its activations: all variants at once would need too much.
    return replace(sized_gpt(size), goals=Goals(1.06, 1.02, 1.01, 1.1, 0.9), epoch_steps=25, together=2)


def sized_gpt(size: GPTSize) -> Workload:
    def texts(samples: int) -> HostData:
        # Low numbers are more frequent than high ones, which a model can learn quickly.
        text = (torch.rand(samples, size.tokens + 1) ** 4 * size.vocabulary).long()
        return HostData(text[:, :-1].contiguous(), text[:, 1:].contiguous())

    return Workload(
        f"GPT {size.layers}x{size.width}, {size.batch}x{size.tokens} tokens, bf16", size.batch,
        10, 400 if size.layers > 2 else 25, "bf16", 3e-4, Goals(1.0, 1.02, 1.02, 1.0, 0.9),
        lambda dropout: GPT(size, dropout), texts,
    )  # fmt: skip


WORKLOADS: dict[str, Callable[[bool], Workload]] = {
    "mlp": mlp_workload,
    "conv": conv_workload,
    "gpt": gpt_workload,
    "gpt-large": large_gpt_workload,
}


@dataclass(frozen=True)
class Contest:
    """The settings that all variants share."""

    workload: Workload
    device: torch.device
    fused: bool
    dataset: HostData
    initial: nn.Module
    log_every: int

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


def open_contest(
    workload: Workload, device: torch.device, fused: bool = True, dropout: float = 0.0, log_every: int = LOG_EVERY
) -> Contest:
    torch.manual_seed(SEED)
    dataset = workload.data(workload.batch * workload.epoch_steps)
    initial = Learner(workload.network(dropout))
    return Contest(workload, device, fused, dataset, initial, log_every)
