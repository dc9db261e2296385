"""Clipping against torch's own functions, and adaptive clipping against its formula."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from samestep.config.optim import ClipConfig
from samestep.errors import CheckpointError
from samestep.optim.clipping import Clipping

CPU = torch.device("cpu")
Groups = list[list[Parameter]]


def groups(seed: int = 0, size: float = 1.0, dtype: torch.dtype = torch.float32) -> Groups:
    """Two groups, the second with larger gradients, and one parameter without any."""
    generator = torch.Generator().manual_seed(seed)
    found: Groups = [[], []]
    for group, factor in zip(found, (1.0, 5.0), strict=True):
        for shape in ((3, 4), (5,)):
            param = Parameter(torch.zeros(shape, dtype=dtype))
            grad = torch.randn(shape, generator=generator).to(dtype)
            param.grad = factor * size * grad
            group.append(param)
        group.append(Parameter(torch.zeros(2, dtype=dtype)))
    return found


def clipping(found: Groups, **rules: Any) -> Clipping:
    return Clipping(ClipConfig(**rules), found, CPU)


def grads(found: Groups) -> list[torch.Tensor]:
    return [param.grad for group in found for param in group if param.grad is not None]


def norm(found: Groups) -> float:
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads(found)))


def test_nothing_is_clipped_or_measured_unless_asked_for() -> None:
    ours = groups()
    assert clipping(ours).apply() is None
    assert all(map(torch.equal, grads(ours), grads(groups())))


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_by_norm_it_is_torchs(limit: float) -> None:
    ours, theirs = groups(), groups()
    found = clipping(ours, norm=limit).apply()
    expected = clip_grad_norm_([param for group in theirs for param in group], limit)
    assert found is not None
    assert found.dim() == 0
    assert torch.equal(found, expected)
    assert all(map(torch.equal, grads(ours), grads(theirs)))


def test_by_norm_each_group_is_torchs() -> None:
    ours, theirs = groups(), groups()
    found = clipping(ours, norm=3.0, per_group=True).apply()
    expected = [clip_grad_norm_(group, 3.0) for group in theirs]
    assert found is not None
    assert found.tolist() == [float(one) for one in expected]
    assert found[0] != found[1]
    assert all(map(torch.equal, grads(ours), grads(theirs)))


def test_by_value_it_is_torchs_and_still_measured() -> None:
    ours, theirs = groups(), groups()
    before = norm(ours)
    found = clipping(ours, value=0.25).apply()
    clip_grad_value_([param for group in theirs for param in group], 0.25)
    assert all(map(torch.equal, grads(ours), grads(theirs)))
    assert float(found) == pytest.approx(before)  # type: ignore[arg-type]


def test_a_parameter_of_two_groups_has_one_gradient() -> None:
    [[param, *_], _] = groups()
    assert param.grad is not None
    before = float(param.grad.norm())
    found = clipping([[param], [param]], norm=before / 2).apply()
    assert float(found) == pytest.approx(before)  # type: ignore[arg-type]
    assert float(param.grad.norm()) == pytest.approx(before / 2)


class Formula:
    """usual <- memory * usual + (1 - memory) * min(norm, multiple * usual)."""

    def __init__(self, multiple: float, memory: float) -> None:
        self.multiple, self.memory = multiple, memory
        self.usual: float | None = None

    def limited(self, norm: float) -> float:
        limit = math.inf if self.usual is None else self.multiple * self.usual
        clipped = min(norm, limit)
        first = self.usual is None
        self.usual = (
            clipped if first else self.memory * self.usual + (1 - self.memory) * clipped  # type: ignore[operator]
        )
        return clipped


SIZES = (1.0, 3.0, 0.2, 9.0, 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("per_group", [False, True])
def test_adaptively_it_is_a_multiple_of_the_running_norm(per_group: bool, dtype: torch.dtype) -> None:
    held = groups(dtype=dtype)
    ours = clipping(held, adaptive=1.5, memory=0.75, per_group=per_group)
    formulas = [Formula(1.5, 0.75) for _ in range(2 if per_group else 1)]
    limited = 0
    for number, size in enumerate(SIZES):
        for params, news in zip(held, groups(number, size, dtype), strict=True):
            for param, new in zip(params, news, strict=True):
                param.grad = new.grad
        clipped_together = [[group] for group in held] if per_group else [held]
        before = [norm(together) for together in clipped_together]
        found = ours.apply()
        assert found is not None
        assert found.flatten().tolist() == pytest.approx(before, rel=1e-5)
        for formula, together, was in zip(formulas, clipped_together, before, strict=True):
            expected = formula.limited(was)
            limited += expected < was
            assert norm(together) == pytest.approx(expected, rel=1e-4)
    assert 0 < limited < len(SIZES) * len(formulas)


@pytest.mark.parametrize("how", ["found on the device", "an infinite norm"])
def test_a_step_that_does_not_count_leaves_the_running_norm(how: str) -> None:
    held = groups()
    ours = clipping(held, adaptive=2.0)
    ours.apply(torch.zeros(()))
    before = copy.deepcopy(ours.state_dict())
    held[0][0].grad = torch.full((3, 4), 1.0 if how == "found on the device" else math.inf)
    ours.apply(torch.ones(()) if how == "found on the device" else None)
    assert torch.equal(ours.state_dict()["usual norms"], before["usual norms"])
    held[0][0].grad = torch.ones(3, 4)
    ours.apply(torch.zeros(()))
    assert not torch.equal(ours.state_dict()["usual norms"], before["usual norms"])


def test_a_first_step_that_does_not_count_sets_no_limit() -> None:
    held = groups()
    ours = clipping(held, adaptive=1.0)
    ours.apply(torch.ones(()))
    before = [grad.clone() for grad in grads(held)]
    ours.apply(torch.zeros(()))
    assert all(map(torch.equal, grads(held), before))


def test_a_running_norm_goes_on_from_its_state() -> None:
    first, held, again = clipping(groups(), adaptive=0.5), groups(3), groups(3)
    first.apply()
    second = clipping(held, adaptive=0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.apply()
    fresh = clipping(again, adaptive=0.5)
    fresh.apply()
    assert norm(held) < norm(again)
    assert second.remembers
    assert not clipping(held, norm=1.0).remembers


@pytest.mark.parametrize("per_group", [False, True])
def test_a_state_of_other_groups_is_refused(per_group: bool) -> None:
    saved = clipping(groups(), adaptive=1.0, per_group=not per_group).state_dict()
    ours = clipping(groups(), adaptive=1.0, per_group=per_group)
    with pytest.raises(CheckpointError, match=r"clip\.per_group"):
        ours.load_state_dict(saved)


def test_a_group_without_gradients_has_no_norm() -> None:
    held = groups()
    for param in held[0]:
        param.grad = None
    found = clipping(held, norm=1.0, per_group=True).apply()
    assert found is not None
    assert found[0] == 0
    assert norm(held) == pytest.approx(1.0, rel=1e-4)
