"""The scaling that does nothing but divide, on which others are built."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samestep.optim.loss_scale import CheckedScaling
from samestep.reduce.scaling import Scaling


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5)])
def test_gradients_are_multiplied_in_place_and_missing_ones_left_out(factor: Any) -> None:
    first, second = torch.tensor([2.0, 4.0]), torch.tensor([8.0])
    Scaling().apply([first, None, second], factor)
    assert (first.tolist(), second.tolist()) == ([1.0, 2.0], [4.0])
    Scaling().apply([None], factor)


def test_a_plain_scaling_lets_every_step_count() -> None:
    scaling = Scaling()
    scaling.begin()
    scaling.expect(8)
    scaling.apply([torch.tensor([float("nan")])], 1.0)
    scaling.check_losses([float("inf"), torch.tensor(float("nan"))])
    scaling.update(8)
    assert not scaling.checks
    assert (scaling.found, scaling.start, scaling.scale, scaling.lowest_scale) == (None,) * 4


def test_scalings_share_no_state() -> None:
    """`found` and `scale` are class attributes: an instance must not change them for all."""
    checked = CheckedScaling(torch.device("cpu"))
    checked.check_losses([float("nan")])
    assert checked.found.item() == 1
    assert Scaling.found is None
    assert Scaling().found is None
