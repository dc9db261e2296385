"""A small GPT whose attention is random on a GPU unless torch is told otherwise."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from samestep import LaneBatch, Task

TOKENS, WIDTH, HEADS, LENGTH = 97, 256, 4, 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        out: Tensor = x + self.mlp(self.after(x))
        return out


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.tokens(x)))
        return out


class Attention(Task):
    def model(self) -> nn.Module:
        return Gpt()

    def optimizers(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def train_data(self) -> TensorDataset:
        draws = torch.Generator().manual_seed(3)
        text = torch.randint(0, TOKENS, (64, LENGTH + 1), generator=draws)
        return TensorDataset(text[:, :-1], text[:, 1:])

    def loss(self, model: nn.Module, batch: LaneBatch) -> Any:
        logits = model(batch.x).flatten(0, 1)
        return F.cross_entropy(logits, batch.y.flatten(), reduction="sum"), batch.y.numel()


class Pooling(Attention):
    """With an operation of which CUDA has no deterministic form."""

    def model(self) -> nn.Module:
        return nn.Conv2d(1, 3, 3)

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.randn(32, 1, 10, 10), torch.zeros(32))

    def loss(self, model: nn.Module, batch: LaneBatch) -> Any:
        return F.adaptive_avg_pool2d(model(batch.x), (3, 3)).square().sum(), len(batch)
