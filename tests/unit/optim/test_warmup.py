"""The rise of the rate, alone and under another schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from samestep.optim.schedules import Warmed, Warmup


def optimizer(*rates: float) -> SGD:
    groups = [{"params": nn.Linear(1, 1).parameters(), "lr": rate} for rate in rates]
    return SGD(groups, lr=1.0)


def rates(found: SGD) -> list[float]:
    return [float(group["lr"]) for group in found.param_groups]


def follow(found: SGD, *schedules: LambdaLR | Warmup | Warmed | StepLR, steps: int) -> list[float]:
    """The first group's rate in each step."""
    seen = []
    for _ in range(steps):
        seen.append(rates(found)[0])
        found.step()
        for schedule in schedules:
            schedule.step()
    return seen


def test_rates_rise_to_their_full_height_in_so_many_steps() -> None:
    found = optimizer(1.0, 0.4)
    warmup = Warmup(found, 3)
    assert rates(found) == pytest.approx([0.25, 0.1])
    assert follow(found, warmup, steps=6) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    assert rates(found) == [1.0, 0.4], "exactly, afterwards"


def test_no_steps_are_no_warmup() -> None:
    found = optimizer(1.0)
    assert Warmup(found, 0).is_over
    assert rates(found) == [1.0]


def test_another_schedule_moves_under_the_rise() -> None:
    found = optimizer(1.0)
    inner = StepLR(found, 1, gamma=0.5)
    warmup = Warmup(found, 3)
    warmed = Warmed(inner, warmup, waits=False)
    expected = [0.25, 0.5 * 0.5, 0.25 * 0.75, 0.125, 0.0625]
    assert follow(found, warmed, warmup, steps=5) == pytest.approx(expected)


def test_a_schedule_that_waits_begins_after_the_rise() -> None:
    found = optimizer(1.0)
    inner = StepLR(found, 1, gamma=0.5)
    warmup = Warmup(found, 2)
    warmed = Warmed(inner, warmup, waits=True)
    assert follow(found, warmed, warmup, steps=5) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5, 0.25])


def test_values_are_passed_to_the_inner_schedule() -> None:
    found = optimizer(1.0)
    warmup = Warmup(found, 1)
    warmed = Warmed(ReduceLROnPlateau(found, factor=0.5, patience=0), warmup, waits=False)
    warmed.step(1.0)
    warmed.step(2.0)  # worse: the full rate is halved, and half of that is shown
    assert rates(found) == [0.25]
    assert warmed.get_last_lr() == [0.25]
    warmup.step()
    assert rates(found) == [0.5]


def test_a_rate_in_a_tensor_stays_in_its_memory() -> None:
    found = optimizer(1.0)
    place = found.param_groups[0]["lr"] = torch.tensor(1.0)
    warmup = Warmup(found, 3)
    assert place.item() == 0.25
    warmup.step()
    assert found.param_groups[0]["lr"] is place
    assert place.item() == 0.5


@pytest.mark.parametrize("after", [0, 1, 3, 5])
def test_a_resumed_rise_continues_where_it_was(after: int) -> None:
    def parts() -> tuple[SGD, StepLR, Warmup, Warmed]:
        found = optimizer(1.0)
        inner = StepLR(found, 2, gamma=0.5)
        warmup = Warmup(found, 3)
        return found, inner, warmup, Warmed(inner, warmup, waits=False)

    found, _, warmup, warmed = parts()
    whole = follow(found, warmed, warmup, steps=8)
    found, _, warmup, warmed = parts()
    follow(found, warmed, warmup, steps=after)
    again, _, new_warmup, new_warmed = parts()
    again.load_state_dict(found.state_dict())
    new_warmup.load_state_dict(warmup.state_dict())
    new_warmed.load_state_dict(warmed.state_dict())
    assert follow(again, new_warmed, new_warmup, steps=8 - after) == pytest.approx(whole[after:])
