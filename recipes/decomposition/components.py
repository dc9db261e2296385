"""Weights as sums of rank-one components, and how a layer computes with some of them.

A layer's weight W becomes V U with a column of V and a row of U for each component. What the components leave over,
the delta W - V U, can be counted as one component more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samestep.errors import TaskError


class Transposed(nn.Module):
    """A linear layer with the transposed weight of another one, and a bias of its own."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        self._source = [source]  # in a list: its weight is its own, and is saved once
        self.bias = nn.Parameter(torch.zeros(source.in_features))

    @property
    def weight(self) -> Tensor:
        return self._source[0].weight.t()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Components(nn.Module):
    """The components of one layer.

    Args:
        rows: the layer's inputs: features, or the words of an embedding.
        columns: its outputs.
        count: how many components.
        is_embedding: whether inputs are numbers of rows.
    """

    def __init__(self, rows: int, columns: int, count: int, is_embedding: bool = False) -> None:
        super().__init__()
        self.rows, self.columns, self.count, self.is_embedding = rows, columns, count, is_embedding
        fan = 1 if is_embedding else rows  # an embedding's input has a single one in it
        self.v = nn.Parameter(torch.randn(rows, count) / math.sqrt(fan))
        self.u = nn.Parameter(torch.randn(count, columns) / math.sqrt(count))

    def inner(self, x: Tensor) -> Tensor:
        """Return how strongly the input has each component: (..., count)."""
        return F.embedding(x, self.v) if self.is_embedding else x @ self.v

    def forward(
        self, x: Tensor, output: Tensor, bias: Tensor | None, mask: Tensor, delta: Tensor | None = None
    ) -> Tensor:
        """Return the layer's output with its components masked.

        Args:
            x: the layer's input.
            output: what the layer itself computes of it.
            bias: the layer's.
            mask: of each component, (..., count).
            delta: of what the components leave over, (...); without it that is left out.
        """
        # inner (m U) + d (x W - inner U), with the products by U taken together.
        if delta is None:
            found = (self.inner(x) * mask) @ self.u
            return found if bias is None else found + bias
        share = delta.unsqueeze(-1)
        found = (self.inner(x) * (mask - share)) @ self.u + share * output
        return found if bias is None else found + (1 - share) * bias

    def product(self) -> Tensor:
        """Return the sum of all components, as (rows, columns)."""
        return self.v @ self.u


class TiedComponents(Components):
    """Components of a transposed weight: those of the other layer, with U and V exchanged."""

    def __init__(self, source: Components) -> None:
        nn.Module.__init__(self)
        self._source = [source]
        self.rows, self.columns, self.count = source.columns, source.rows, source.count
        self.is_embedding = False

    @property
    def v(self) -> Tensor:  # type: ignore[override]
        return self._source[0].u.t()

    @property
    def u(self) -> Tensor:  # type: ignore[override]
        return self._source[0].v.t()


def weight_of(module: nn.Module) -> Tensor:
    """Return a layer's weight as (inputs, outputs)."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight if isinstance(module, nn.Embedding) else weight.t()


def is_decomposable(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding, Transposed))


def components_of(module: nn.Module, count: int, tied_to: Components | None = None) -> Components:
    """New components for a layer; none of its own where they are tied to another layer's."""
    rows, columns = weight_of(module).shape
    if tied_to is None:
        return Components(rows, columns, count, isinstance(module, nn.Embedding))
    if (tied_to.columns, tied_to.rows) != (rows, columns) or tied_to.is_embedding:
        raise TaskError(
            f"params.tied: a layer from {rows} to {columns} cannot have the components of one from {tied_to.rows} to {tied_to.columns}"
        )
    return TiedComponents(tied_to)


def unfaithfulness(pairs: Iterator[tuple[nn.Module, Components]]) -> Tensor:
    """Return the mean squared difference of the weights from the sums of their components."""
    squares, count = [], 0
    for module, components in pairs:
        delta = weight_of(module).detach() - components.product()
        squares.append(delta.square().sum())
        count += delta.numel()
    return torch.stack(squares).sum() / count
