"""Contrasts of every sample with all others of a batch: give them to `step.train_global`, or return them
from `Task.batch_loss`, and the batch is the global one.

Each is a mean over samples. The matrix of similarities can be taken in pieces (`rows_at_once`): then it
need not fit into memory. In a step over a large global batch its rows are distributed among the ranks.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.errors import TaskError
from samestep.losses.row_blocks import Piece, sum_over_anchors


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
