"""Modules in evaluation mode, and the buffers that must not move there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from samestep.errors import TaskError
from samestep.evaluation.eval_mode import BufferSnapshot, refuse_changed


class Holder(nn.Module):
    """A kept buffer, one that no checkpoint keeps, and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.tensor([0.0, math.nan]))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("empty", None)


def test_untouched_buffers_are_the_same_also_if_one_is_nan() -> None:
    assert BufferSnapshot([Holder(), Holder()]).changed() == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m.kept.add_(1), ["kept"]),
        (lambda m: setattr(m, "kept", m.kept + 1), ["kept"]),
        (lambda m: m.kept.data.neg_(), ["kept"]),  # -0.0, and no version counter moves
        (lambda m: setattr(m, "kept", m.kept[:1]), ["kept"]),
        (lambda m: setattr(m, "kept", None), ["kept"]),
        (lambda m: setattr(m, "empty", torch.zeros(1)), ["empty"]),
        (lambda m: m.cache.add_(1), ["cache"]),
        (lambda m: setattr(m, "cache", torch.zeros(3)), []),  # a cache that grew
        (lambda m: m.register_buffer("later", torch.zeros(1), persistent=False), []),
    ],
)
def test_other_bits_are_a_change(change: Any, named: list[str]) -> None:
    modules = [nn.Linear(1, 1), nn.Sequential(Holder())]
    snapshot = BufferSnapshot(modules)
    change(modules[1][0])
    assert snapshot.changed() == [f"extra module 1.0.{name} (Holder)" for name in named]


def test_buffers_go_back_into_the_tensors_that_held_them() -> None:
    holder = Holder()
    tensor = holder.kept
    snapshot = BufferSnapshot([holder])
    tensor.add_(1)
    holder.kept = torch.ones(2)
    snapshot.restore()
    assert holder.kept is tensor
    assert tensor[0] == 0
    assert snapshot.changed() == []


def test_a_change_on_any_rank_is_an_error() -> None:
    refuse_changed([[], []], "the evaluation")
    with pytest.raises(TaskError, match=r"the evaluation changed .*: model\.a \(B\), model\.c \(D\)\."):
        refuse_changed([["model.c (D)"], ["model.a (B)", "model.c (D)"]], "the evaluation")
