"""A small vision transformer and a causal text decoder that attends to it; torch and nothing else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pictures import CELL, END, LENGTH, PAD, SIZE, START, WORDS
from torch import Tensor, nn

from samestep.errors import TaskError


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """`a @ b.T`, and a bias, in the precision that autocast asks for; fast on CPUs too.

    Most CPUs have no arithmetic of 16 bits, and torch's then takes a hundred times as long. Here numbers are rounded to
    16 bits, multiplied in float32, and the result is rounded, as a GPU does; and so are gradients, which overflow where they
    would on a GPU.
    """
    kind = a.device.type
    if kind != "cpu" or not torch.is_autocast_enabled(kind):
        return a @ b.transpose(-2, -1) if bias is None else F.linear(a, b, bias)
    half = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        out = a.to(half).float() @ b.to(half).float().transpose(-2, -1)
        return (out if bias is None else out + bias).to(half)


class Linear(nn.Linear):
    """torch's, by `product`."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


class Attention(nn.Module):
    """Of queries to a memory, with several heads.

    Written out: as a product, a softmax in float32 and a product it is deterministic on every device.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.both = Linear(dim, dim), Linear(dim, 2 * dim)
        self.out = Linear(dim, dim)

    def forward(self, x: Tensor, memory: Tensor, hidden: Tensor | None = None) -> Tensor:
        batch, length, dim = x.shape
        query = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        both = self.both(memory).view(batch, memory.shape[1], 2, self.heads, -1)
        key, value = both.permute(2, 0, 3, 1, 4)
        scores = product(query, key).float() * (dim // self.heads) ** -0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        mixed = product(scores.softmax(-1), value.transpose(-2, -1))
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return out


class Block(nn.Module):
    """Attention to itself, to a memory if there is one, and a layer for each position; pre-norm."""

    def __init__(self, dim: int, heads: int, with_memory: bool) -> None:
        super().__init__()
        self.own_norm, self.own = nn.LayerNorm(dim), Attention(dim, heads)
        self.memory_norm = nn.LayerNorm(dim) if with_memory else None
        self.memory = Attention(dim, heads) if with_memory else None
        self.mlp = nn.Sequential(nn.LayerNorm(dim), Linear(dim, 4 * dim), nn.ReLU(), Linear(4 * dim, dim))

    def forward(self, x: Tensor, memory: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        normed = self.own_norm(x)
        x = x + self.own(normed, normed, hidden)
        if self.memory is not None and self.memory_norm is not None:
            x = x + self.memory(self.memory_norm(x), memory)
        out: Tensor = x + self.mlp(x)
        return out


class Captioner(nn.Module):
    """The logits of each next word, given pictures and the words before it."""

    def __init__(self, dim: int, heads: int, vision_layers: int, text_layers: int) -> None:
        super().__init__()
        if dim % heads:
            raise TaskError(f"params.dim is {dim}, which {heads} heads do not divide: set another")
        patches = (SIZE // CELL) ** 2
        self.patch = Linear(CELL * CELL * 3, dim)
        self.place = nn.Parameter(0.5 * torch.randn(patches, dim))
        self.vision = nn.ModuleList(Block(dim, heads, False) for _ in range(vision_layers))
        self.vision_norm = nn.LayerNorm(dim)
        self.word = nn.Embedding(len(WORDS), dim)
        self.position = nn.Parameter(0.5 * torch.randn(LENGTH, dim))
        self.text = nn.ModuleList(Block(dim, heads, True) for _ in range(text_layers))
        self.text_norm, self.head = nn.LayerNorm(dim), Linear(dim, len(WORDS))
        self.register_buffer("later", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), persistent=False)

    def see(self, pictures: Tensor) -> Tensor:
        """Return what the decoder attends to: a vector for each patch of pictures of bytes."""
        batch, cells = len(pictures), SIZE // CELL
        pixels = pictures.float() / 127.5 - 1
        patches = pixels.view(batch, cells, CELL, cells, CELL, 3).transpose(2, 3)
        x = self.patch(patches.reshape(batch, cells**2, -1)) + self.place
        for block in self.vision:
            x = block(x)
        out: Tensor = self.vision_norm(x)
        return out

    def speak(self, seen: Tensor, words: Tensor) -> Tensor:
        """Return the logits of the word after each of these."""
        length = words.shape[1]
        x = self.word(words) + self.position[:length]
        hidden = self.later[:length, :length]
        for block in self.text:
            x = block(x, seen, hidden)
        out: Tensor = self.head(self.text_norm(x))
        return out

    def forward(self, pictures: Tensor, words: Tensor) -> Tensor:
        return self.speak(self.see(pictures), words)


def loss_of(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss summed over words, and how many these are: captions have different lengths."""
    targets = tokens[:, 1:]
    ignored = WORDS.index(PAD)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=ignored, reduction="sum")
    return loss, (targets != ignored).sum()


@torch.no_grad()
def generate(model: Captioner, pictures: Tensor) -> list[list[int]]:
    """Captions of pictures: at each place the most probable word."""
    seen = model.see(pictures)
    words = torch.full((len(pictures), 1), WORDS.index(START), device=pictures.device)
    for _ in range(LENGTH):
        following = model.speak(seen, words)[:, -1].argmax(-1, keepdim=True)
        words = torch.cat([words, following], 1)
        if (words == WORDS.index(END)).any(1).all():
            break
    found: list[list[int]] = words[:, 1:].tolist()
    return found
