"""The models that are decomposed: small ones, of which one knows what is inside."""

from __future__ import annotations

import math

import torch
from components import Transposed
from torch import Tensor, nn
from torch.nn import functional as F


class ToyModel(nn.Module):
    """A toy model of superposition: more features than dimensions between, and one weight for both ways."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(features, hidden, bias=False)
        self.linear2 = Transposed(self.linear1)
        nn.init.xavier_normal_(self.linear1.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear2(self.linear1(x)))


class Block(nn.Module):
    """Two layers with ReLU between, without biases."""

    def __init__(self, embedded: int, neurons: int) -> None:
        super().__init__()
        self.mlp_in = nn.Linear(embedded, neurons, bias=False)
        self.mlp_out = nn.Linear(neurons, embedded, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mlp_out(F.relu(self.mlp_in(x)))
        return found


class ResidualMlp(nn.Module):
    """Blocks on a residual stream, into which features are embedded in fixed random directions."""

    def __init__(self, features: int, embedded: int, neurons: int, layers: int) -> None:
        super().__init__()
        self.embedding: Tensor
        directions = F.normalize(torch.randn(features, embedded), dim=1)
        self.register_buffer("embedding", directions)
        self.layers = nn.ModuleList(Block(embedded, neurons) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        stream = x @ self.embedding
        for layer in self.layers:
            stream = stream + layer(stream)
        return stream @ self.embedding.t()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        query, key, value = (
            layer(x).view(rows, length, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(width / self.heads)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        found = scores.masked_fill(later, -math.inf).softmax(-1) @ value
        mixed: Tensor = self.out(found.transpose(1, 2).reshape(rows, length, width))
        return mixed


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        found: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.norm2(x))))
        return found


class LanguageModel(nn.Module):
    """A causal transformer: the logits of the next word at each position."""

    def __init__(self, words: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm, self.unembedding = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.unembedding(self.norm(x))
        return logits
