"""Contrasts of every sample with all others of a batch: give them to `step.train_global`, or return them
from `Task.batch_loss`, and the batch is the global one.

Each is a mean over samples. The matrix of similarities can be taken in pieces (`rows_at_once`): then it
need not fit into memory. In a step over a large global batch its rows are distributed among the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from samestep.errors import TaskError


def supcon(
    embeddings: Tensor,
    labels: Tensor,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    contrast: Literal["all", "one"] = "all",
    rows_at_once: int | None = None,
) -> Tensor:
    """Return the supervised contrastive loss: samples of one class attract each other, all others repel.

    Anchors without another sample or view of their class are left out; a batch in which all are has
    the loss 0.

    Args:
        embeddings: Of each sample, or of each of its views: (samples, size) or (samples, views, size).
            They are normalized here.
        labels: One for each sample.
        temperature: What similarities are divided by.
        base_temperature: The loss is multiplied by `temperature / base_temperature`; by 1 if None.
        contrast: Whether all views are anchors, or the first of each sample.
        rows_at_once: How many anchors are compared with all others at once; None for all.
    """
    views = _views(embeddings)
    samples = len(views)
    if labels.shape != (samples,):
        raise TaskError(
            f"supcon got {samples} samples and labels of the shape {tuple(labels.shape)}: give one for each"
        )
    _check("temperature", temperature)
    others = views.transpose(0, 1).flatten(0, 1)  # all first views, then all second ones
    classes = labels.repeat(views.shape[1])
    anchors = len(others) if contrast == "all" else samples
    numbers = torch.arange(len(others), device=others.device)

    def piece(at: slice, others: Tensor) -> tuple[Tensor, Tensor]:
        itself = numbers == numbers[at, None]
        similar = (others[at] @ others.T / temperature).masked_fill(itself, -torch.inf)
        positive = (classes == classes[at, None]) & ~itself
        log_share = (similar - similar.logsumexp(1, keepdim=True)).masked_fill(~positive, 0.0)
        count = positive.sum(1)
        return -(log_share.sum(1) / count.clamp(min=1)).sum(), (count > 0).sum()

    total, valid = _by_pieces(piece, anchors, rows_at_once, others)
    factor = 1.0 if base_temperature is None else temperature / base_temperature
    return factor * total / valid.clamp(min=1)


def nt_xent(embeddings: Tensor, temperature: float = 0.5, rows_at_once: int | None = None) -> Tensor:
    """SimCLR's loss: the views of one sample attract each other, all others repel.

    Args:
        embeddings: (samples, views, size), at least two views. They are normalized here. With more than
            two, every other view of a sample is a positive one and their terms are averaged, which is
            SupCon with each sample as its own class; SimCLR itself has two.
        temperature: What similarities are divided by.
        rows_at_once: How many anchors are compared with all others at once; None for all.
    """
    if embeddings.dim() != 3 or embeddings.shape[1] < 2:
        raise TaskError(
            f"nt_xent got embeddings of the shape {tuple(embeddings.shape)}: give two views of each "
            "sample, as (samples, views, size)"
        )
    itself = torch.arange(len(embeddings), device=embeddings.device)
    return supcon(embeddings, itself, temperature, rows_at_once=rows_at_once)


def clip(left: Tensor, right: Tensor, scale: Tensor | float, rows_at_once: int | None = None) -> Tensor:
    """CLIP's loss: each left embedding finds its right one among all, and the other way round.

    Args:
        left: (samples, size), such as of images. Normalized here, as `right` is.
        right: Of the same samples, such as of texts.
        scale: What similarities are multiplied by; a parameter of yours, or a number.
        rows_at_once: How many samples are compared with all others at once; None for all.
    """
    left, right = _pairs(left, right)
    targets = torch.arange(len(left), device=left.device)

    def piece(at: slice, left: Tensor, right: Tensor, scale: Tensor | float) -> tuple[Tensor, Tensor]:
        there = F.cross_entropy(left[at] @ right.T * scale, targets[at], reduction="sum")
        back = F.cross_entropy(right[at] @ left.T * scale, targets[at], reduction="sum")
        return there + back, (targets[at] >= 0).sum()

    total, count = _by_pieces(piece, len(left), rows_at_once, left, right, scale)
    return total / (2 * count)


def siglip(
    left: Tensor, right: Tensor, scale: Tensor | float, bias: Tensor | float, rows_at_once: int | None = None
) -> Tensor:
    """SigLIP's loss: for each pair of a left and a right embedding, whether they belong together.

    Args:
        left: (samples, size), such as of images. Normalized here, as `right` is.
        right: Of the same samples, such as of texts.
        scale: What similarities are multiplied by; a parameter of yours, or a number.
        bias: What is added to them.
        rows_at_once: How many samples are compared with all others at once; None for all.
    """
    left, right = _pairs(left, right)
    numbers = torch.arange(len(left), device=left.device)

    def piece(
        at: slice, left: Tensor, right: Tensor, scale: Tensor | float, bias: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        logits = left[at] @ right.T * scale + bias
        signed = torch.where(numbers == numbers[at, None], logits, -logits)
        return -F.logsigmoid(signed).sum(), (numbers[at] >= 0).sum()

    total, count = _by_pieces(piece, len(left), rows_at_once, left, right, scale, bias)
    return total / count


def _by_pieces(piece: Piece, anchors: int, at_once: int | None, *tensors: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return the sums of what `piece` returns for some anchors at a time."""
    if at_once is not None:
        _check("rows_at_once", at_once)
    return sum_over_anchors(piece, anchors, at_once, *tensors)


def _views(embeddings: Tensor) -> Tensor:
    if embeddings.dim() not in (2, 3):
        raise TaskError(
            f"supcon got embeddings of the shape {tuple(embeddings.shape)}: give (samples, size), or "
            "(samples, views, size)"
        )
    views = embeddings if embeddings.dim() == 3 else embeddings.unsqueeze(1)
    return F.normalize(views, dim=-1)


def _pairs(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    if left.dim() != 2 or left.shape != right.shape:
        raise TaskError(
            f"got embeddings of the shapes {tuple(left.shape)} and {tuple(right.shape)}: give two of "
            "the shape (samples, size), a row of each for every sample"
        )
    return F.normalize(left, dim=-1), F.normalize(right, dim=-1)


def _check(name: str, value: float) -> None:
    if not value > 0:
        raise TaskError(f"{name} is {value}: give a number above 0")


SHARED_FROM = 4096
"""Anchors from which blocks are distributed: below, blocks cost one process more than they save several."""

Piece = Callable[..., tuple[Tensor, Tensor]]
"""Takes a slice of the anchors and the loss's tensors; returns what these anchors contribute, and how
many of them count."""


class SharedRows(Protocol):
    """Processes that compute the same loss of the same batch, and deal out its anchors."""

    blocks: int
    """Number of all blocks; depends on nothing but the run, so that its bits do not either."""
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
