"""Causal importance: how much of each component an input needs, between 0 and 1, by small networks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import TaskError

SLOPE = 0.01
"""Of both sigmoids where they leak."""


class _LowerLeaky(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,), (gradient,) = ctx.saved_tensors, gradients
        # Below 0 only what wants to rise: a component that is off can come back, and does not sink further.
        below = torch.where(gradient < 0, SLOPE * gradient, 0.0)
        return torch.where(x <= 0, below, torch.where(x <= 1, gradient, 0.0))


def lower_leaky(x: Tensor) -> Tensor:
    """Return a hard sigmoid for masks: 0 to 1, with a gradient below 0 that can only lift."""
    found: Tensor = _LowerLeaky.apply(x)  # type: ignore[no-untyped-call]
    return found


def upper_leaky(x: Tensor) -> Tensor:
    """Return a hard sigmoid for sparsity: above 1 it goes on rising a little, so that there is a way down."""
    return torch.where(x > 1, 1 + SLOPE * (x - 1), x.clamp(0, 1))


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        share = torch.erf(x * math.sqrt(0.5)).add_(1).mul_(0.5)
        bell = x.square().mul_(-0.5).exp_()
        ctx.save_for_backward(torch.addcmul(share, x, bell, value=1 / math.sqrt(2 * math.pi)))
        return share.mul_(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.saved_tensors[0]


def gelu(x: Tensor) -> Tensor:
    """GELU; torch's own took twice as long for both passes on a CPU here."""
    found: Tensor = _Gelu.apply(x)  # type: ignore[no-untyped-call]
    return found


def _weights(*shape: int, fan: int, gain: float = math.sqrt(2)) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * gain / math.sqrt(fan))


class ScalarNetworks(nn.Module):
    """For each component a network of its own, of how strongly the input has it."""

    def __init__(self, count: int, hidden: int) -> None:
        super().__init__()
        self.first = _weights(count, hidden, fan=1)
        self.first_bias = nn.Parameter(torch.zeros(count, hidden))
        self.second = _weights(count, hidden, fan=hidden, gain=1)
        self.second_bias = nn.Parameter(torch.zeros(count))

    def forward(self, x: Tensor, inner: Tensor) -> Tensor:
        # As products of matrices, one for each component: sums over positions are then no passes of their own.
        by_component = inner.flatten(0, -2).t().unsqueeze(-1)
        found = torch.baddbmm(self.first_bias.unsqueeze(1), by_component, self.first.unsqueeze(1))
        raw = torch.bmm(gelu(found), self.second.unsqueeze(-1)).squeeze(-1).t()
        return raw.reshape(inner.shape) + self.second_bias


class VectorNetworks(nn.Module):
    """For each component a network of its own, of the layer's whole input."""

    def __init__(self, rows: int, count: int, hidden: int) -> None:
        super().__init__()
        self.first = _weights(rows, count * hidden, fan=rows)
        self.first_bias = nn.Parameter(torch.zeros(count * hidden))
        self.second = _weights(count, hidden, fan=hidden, gain=1)
        self.second_bias = nn.Parameter(torch.zeros(count))

    def forward(self, x: Tensor, inner: Tensor) -> Tensor:
        found = gelu(x @ self.first + self.first_bias).unflatten(-1, self.second.shape)
        return (found * self.second).sum(-1) + self.second_bias


class SharedNetwork(nn.Module):
    """One network for all components of a layer, of its whole input."""

    def __init__(self, rows: int, count: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(rows, hidden), nn.Linear(hidden, count)

    def forward(self, x: Tensor, inner: Tensor) -> Tensor:
        found: Tensor = self.second(gelu(self.first(x)))
        return found


KINDS = ("mlp", "vector_mlp", "shared_mlp")


def importance_of(kind: str, rows: int, count: int, hidden: int, is_embedding: bool) -> nn.Module:
    """Return the importance function of a layer. An embedding's input is no vector: it has one network for each
    component.
    """
    if kind not in KINDS:
        raise TaskError(f"params.importance is {kind!r}: give {', '.join(KINDS)}")
    if kind == "mlp" or is_embedding:
        return ScalarNetworks(count, hidden)
    made = VectorNetworks if kind == "vector_mlp" else SharedNetwork
    return made(rows, count, hidden)
