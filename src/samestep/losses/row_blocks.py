"""A sum over the anchors of a batch, block by block: no matrix of all with all, and no one process
that computes all of it.

A loss is a sum of what each anchor contributes, so a block's gradient can be taken as soon as its part
of the sum is there: nothing of it is kept, and nothing is computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SHARED_FROM = 4096
"""Anchors from which blocks are distributed: below, blocks cost one process more than they save several."""

Piece = Callable[..., tuple[Tensor, Tensor]]
"""Takes a slice of the anchors and the loss's tensors; returns what these anchors contribute, and how
many of them count."""


class SharedRows(Protocol):
    """Processes that compute the same loss of the same batch, and deal out its anchors."""

    blocks: int
    """How many there are in all; depends on nothing but the run, so that its bits do not either."""
    mine: range
    """Those of this process."""

    def add(self, parts: Mapping[int, Tensor]) -> Tensor:
        """Return the sum of the vectors of all blocks, in one fixed order; every process calls this.

        Args:
            parts: By block, this process's.
        """


_shared: ContextVar[SharedRows | None] = ContextVar("shared_rows", default=None)


@contextmanager
def sharing(shared: SharedRows) -> Iterator[None]:
    """While losses are called that deal out their anchors."""
    token = _shared.set(shared)
    try:
        yield
    finally:
        _shared.reset(token)


def sum_over_anchors(
    piece: Piece, anchors: int, at_once: int | None, *tensors: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Return the sums of what `piece` returns for all anchors.

    Args:
        piece: Called with a slice of the anchors and the tensors.
        anchors: How many there are.
        at_once: How many anchors are in a slice at most; None for as many as there are.
        *tensors: What the sum is differentiated by, and numbers that are not.
    """
    shared = _shared.get()
    if shared is not None and anchors < SHARED_FROM:
        shared = None
    if shared is None and at_once is None:
        return piece(slice(0, anchors), *tensors)
    return _anchor_sum(piece, anchors, at_once, shared, *tensors)


class _AnchorSum(torch.autograd.Function):
    """Takes the gradient with the sum; it is linear in what comes from above."""

    @staticmethod
    def forward(
        ctx: Any, piece: Piece, anchors: int, at_once: int | None, shared: SharedRows | None, *tensors: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        ctx.wanted = ctx.needs_input_grad[4:]
        blocks, mine = (1, range(1)) if shared is None else (shared.blocks, shared.mine)
        parts = {}
        for block in mine:
            rows = range(block * anchors // blocks, (block + 1) * anchors // blocks)
            parts[block] = _block_sum(piece, rows, at_once or anchors, tensors, ctx.wanted)
        whole = parts[0] if shared is None else shared.add(parts)
        trained = _trained(tensors, ctx.wanted)
        total, count, *flat = whole.split([1, 1, *(tensor.numel() for tensor in trained)])
        pairs = zip(flat, trained, strict=True)
        ctx.save_for_backward(*(found.view_as(tensor).to(tensor) for found, tensor in pairs))
        count = count.view(())
        ctx.mark_non_differentiable(count)
        return total.view(()), count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *above: Tensor) -> tuple[Any, ...]:
        gradients = iter(ctx.saved_tensors)
        each = [next(gradients) * above[0] if wanted else None for wanted in ctx.wanted]
        return None, None, None, None, *each


_anchor_sum: Callable[..., tuple[Tensor, Tensor]] = _AnchorSum.apply


def _block_sum(piece: Piece, rows: range, at_once: int, tensors: tuple[Tensor | float, ...], wanted: Any) -> Tensor:
    """Return what some anchors contribute, how many of them count, and their gradients: one vector."""
    trained = _trained(tensors, wanted)
    leaves = [tensor.detach().requires_grad_() for tensor in trained]
    left = iter(leaves)
    inputs = [next(left) if want else tensor for tensor, want in zip(tensors, wanted, strict=True)]
    found: Tensor | None = None
    for start in range(rows.start, max(rows.stop, rows.start + 1), at_once):
        with torch.enable_grad():
            value, count = piece(slice(start, min(start + at_once, rows.stop)), *inputs)
        gradients = torch.autograd.grad(value, leaves) if leaves else ()
        here = [value.detach().view(1), count.view(1), *(part.flatten() for part in gradients)]
        found = torch.cat(here) if found is None else found.add_(torch.cat(here))
    assert found is not None, "the range above has at least one start"
    return found


def _trained(tensors: tuple[Tensor | float, ...], wanted: Any) -> list[Tensor]:
    pairs = zip(tensors, wanted, strict=True)
    return [tensor for tensor, want in pairs if want and isinstance(tensor, Tensor)]
