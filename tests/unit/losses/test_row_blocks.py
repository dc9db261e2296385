"""Sums over anchors, block by block: those of the whole, with its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from samestep.losses import clip, contrastive, nt_xent, siglip, supcon


class Alone:
    """One process that computes all blocks, as if they were distributed."""

    blocks, mine = 5, range(5)

    def __init__(self) -> None:
        self.added = 0

    def add(self, parts: Mapping[int, Tensor]) -> Tensor:
        assert sorted(parts) == [0, 1, 2, 3, 4]
        self.added += 1
        return torch.stack(list(parts.values())).sum(0)


def rows(*shape: int) -> Tensor:
    made = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return made.requires_grad_()


SCALES = [torch.tensor(value, requires_grad=True) for value in (3.0, -1.0)]
LABELS = torch.arange(12) % 3
LOSSES: dict[str, Callable[..., Tensor]] = {
    "supcon": lambda z, at: supcon(z, LABELS, 0.3, base_temperature=0.6, rows_at_once=at),
    "supcon, one": lambda z, at: supcon(z, LABELS, 0.3, contrast="one", rows_at_once=at),
    "nt_xent": lambda z, at: nt_xent(z, rows_at_once=at),
    "clip": lambda z, at: clip(z[:, 0], z[:, 1], SCALES[0], rows_at_once=at),
    "siglip": lambda z, at: siglip(z[:, 0], z[:, 1], *SCALES, rows_at_once=at),
    "siglip, numbers": lambda z, at: siglip(z[:, 0], z[:, 1], 4.0, -1.0, rows_at_once=at),
}


@pytest.mark.parametrize("at_once", [None, 2, 100])
@pytest.mark.parametrize("name", LOSSES)
def test_blocks_add_up_to_the_whole_with_its_gradients(
    name: str, at_once: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    z, shared = rows(12, 2, 3), Alone()
    expected = gradients_of(LOSSES[name](z, None), z)
    monkeypatch.setattr(contrastive, "SHARED_FROM", 12)
    with contrastive.sharing(shared):
        found = gradients_of(LOSSES[name](z, at_once), z)
    assert shared.added == 1
    assert found[0].dtype == expected[0].dtype
    torch.testing.assert_close(found, expected, check_dtype=False, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradients_of(LOSSES[name](z, at_once), z), expected, rtol=1e-5, atol=1e-7)


def gradients_of(loss: Tensor, z: Tensor) -> list[Any]:
    found = torch.autograd.grad(3 * loss, [z, *SCALES], allow_unused=True)
    return [loss.detach(), *(grad for grad in found if grad is not None)]


def test_more_blocks_than_anchors_leave_some_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    z, labels = rows(3, 4), torch.tensor([0, 0, 1])
    monkeypatch.setattr(contrastive, "SHARED_FROM", 1)
    with contrastive.sharing(Alone()):
        found = supcon(z, labels)
    torch.testing.assert_close(found, supcon(z, labels))


def test_a_small_batch_is_not_dealt_out() -> None:
    shared = Alone()
    with contrastive.sharing(shared):
        supcon(rows(12, 3), LABELS)
    assert shared.added == 0
