"""Learning rates in device memory; a CPU stands in for the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from samestep.optim.update import DeviceRates, takes_rate_from_device


def optimizers() -> list[Optimizer]:
    """One that reads its rates on the device, with two groups, and one that does not."""
    able = [nn.Linear(1, 1), nn.Linear(1, 1)]
    groups = [{"params": able[0].parameters()}, {"params": able[1].parameters(), "lr": 0.2}]
    return [AdamW(groups, lr=0.1, fused=True), SGD(nn.Linear(1, 1).parameters(), lr=0.3)]


@pytest.mark.parametrize(
    ("options", "takes"), [({"fused": True}, True), ({"capturable": True, "foreach": False}, True), ({}, False)]
)
def test_fused_and_capturable_optimizers_read_rates_on_the_device(options: dict[str, bool], takes: bool) -> None:
    assert takes_rate_from_device(AdamW(nn.Linear(1, 1).parameters(), **options)) is takes


def test_one_group_that_cannot_is_enough() -> None:
    optimizer = optimizers()[0]
    optimizer.param_groups[1]["fused"] = False
    assert not takes_rate_from_device(optimizer)


def test_on_a_cpu_rates_stay_numbers() -> None:
    every = optimizers()
    rates = DeviceRates(every, torch.device("cpu"))
    rates.refresh()
    rates.put()
    assert [type(group["lr"]) for group in every[0].param_groups] == [float, float]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> list[Optimizer]:
    """Rates as on a GPU, whose memory is the host's."""
    plain = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda value, dtype, device: plain(value, dtype=dtype, device="cpu"))
    return optimizers()


def test_optimizers_see_tensors_and_schedules_see_numbers(on_device: list[Optimizer]) -> None:
    rates = DeviceRates(on_device, torch.device("cuda"))
    able, other = on_device
    with rates.put():
        assert [group["lr"].item() for group in able.param_groups] == pytest.approx([0.1, 0.2])
        assert other.param_groups[0]["lr"] == 0.3, "it cannot read a tensor there"
    assert [group["lr"] for group in able.param_groups] == [0.1, 0.2], "not rounded to float32"


def test_a_changed_rate_reaches_the_same_memory(on_device: list[Optimizer]) -> None:
    rates = DeviceRates(on_device, torch.device("cuda"))
    able = on_device[0]
    with rates.put():
        places = [group["lr"].data_ptr() for group in able.param_groups]
    able.param_groups[1]["lr"] = 0.05
    rates.refresh()
    with rates.put():
        assert [group["lr"].data_ptr() for group in able.param_groups] == places
        assert [group["lr"].item() for group in able.param_groups] == pytest.approx([0.1, 0.05])
    assert [group["lr"] for group in able.param_groups] == [0.1, 0.05]


def test_a_capture_before_the_rates_are_brought_there_leaves_them_as_a_schedule_set_them(
    on_device: list[Optimizer],
) -> None:
    """It was lost once: a step is captured between the schedule's move and the update's begin."""
    rates = DeviceRates(on_device, torch.device("cuda"))
    group = on_device[0].param_groups[0]
    group["lr"] = 0.05
    with rates.put():
        pass
    assert group["lr"] == 0.05
    rates.refresh()
    with rates.put():
        assert group["lr"].item() == pytest.approx(0.05)
