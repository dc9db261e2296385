"""Contrastive losses, compared with how their papers write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.errors import TaskError
from samestep.losses import clip, nt_xent, siglip, supcon

LABELS = torch.tensor([0, 1, 0, 2, 1, 0])


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def by_hand(z: Tensor, labels: Tensor, temperature: float, anchors: int) -> float:
    """One anchor at a time, one other at a time."""
    z = F.normalize(z, dim=1)
    losses = []
    for i in range(anchors):
        others = [j for j in range(len(z)) if j != i]
        partners = [j for j in others if labels[j] == labels[i]]
        if partners:
            whole = math.log(sum(math.exp(z[i] @ z[j] / temperature) for j in others))
            shares = [float(z[i] @ z[j]) / temperature - whole for j in partners]
            losses.append(-sum(shares) / len(partners))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("rows_at_once", [None, 1, 4, 100])
def test_supcon_of_single_views_skips_those_without_a_partner(rows_at_once: int | None) -> None:
    z = rows(6, 3)
    found = supcon(z, LABELS, 0.3, rows_at_once=rows_at_once)
    assert float(found) == pytest.approx(by_hand(z, LABELS, 0.3, 6))


@pytest.mark.parametrize(("contrast", "anchors"), [("all", 12), ("one", 6)])
def test_supcon_of_two_views(contrast: Any, anchors: int) -> None:
    z = rows(6, 2, 3)
    flat, labels = torch.cat([z[:, 0], z[:, 1]]), LABELS.repeat(2)
    found = supcon(z, LABELS, 0.3, base_temperature=0.6, contrast=contrast)
    assert float(found) == pytest.approx(by_hand(flat, labels, 0.3, anchors) / 2)


def test_nt_xent_is_a_choice_of_the_partner_among_all_others() -> None:
    z = rows(4, 2, 3)
    flat = F.normalize(torch.cat([z[:, 0], z[:, 1]]), dim=1)
    similar = (flat @ flat.T / 0.5).fill_diagonal_(-math.inf)
    expected = F.cross_entropy(similar, torch.arange(8).roll(4))
    assert float(nt_xent(z)) == pytest.approx(float(expected))


def test_no_anchor_with_a_partner_is_no_loss_and_has_a_gradient() -> None:
    z = rows(3, 2).requires_grad_()
    loss = supcon(z, torch.arange(3))
    loss.backward()
    assert loss.item() == 0.0
    assert z.grad is not None
    assert not z.grad.any()


def test_clip_finds_each_in_the_other() -> None:
    left, right = rows(5, 3), rows(5, 3).flip(0)
    similar = 7.0 * F.normalize(left, dim=1) @ F.normalize(right, dim=1).T
    here = torch.arange(5)
    expected = (F.cross_entropy(similar, here) + F.cross_entropy(similar.T, here)) / 2
    assert float(clip(left, right, 7.0)) == pytest.approx(float(expected))


def test_siglip_asks_each_pair() -> None:
    left, right = rows(5, 3), rows(5, 3).flip(0)
    logits = 7.0 * F.normalize(left, dim=1) @ F.normalize(right, dim=1).T - 2.0
    wanted = torch.eye(5, dtype=torch.float64)
    expected = F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum") / 5
    assert float(siglip(left, right, 7.0, -2.0)) == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: supcon(rows(6), LABELS), "embeddings of the shape (6,)"),
        (lambda: supcon(rows(6, 2), LABELS[1:]), "6 samples and labels of the shape (5,)"),
        (lambda: supcon(rows(6, 2), LABELS, 0.0), "temperature is 0.0: give a number above 0"),
        (lambda: supcon(rows(6, 2), LABELS, rows_at_once=0), "rows_at_once is 0"),
        (lambda: nt_xent(rows(6, 2)), "give two views of each"),
        (lambda: clip(rows(6, 2), rows(5, 2), 1.0), "(6, 2) and (5, 2)"),
    ],
)
def test_wrong_shapes_are_named(call: Callable[[], Tensor], words: str) -> None:
    with pytest.raises(TaskError) as caught:
        call()
    assert words in str(caught.value)
