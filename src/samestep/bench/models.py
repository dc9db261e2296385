"""Networks to measure with: an MLP, a residual network of convolutions, and a GPT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
