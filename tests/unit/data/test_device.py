"""Batches on their way to a device, as far as a machine without one can tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samestep.config.schema import LoaderConfig
from samestep.data.device import DeviceCopies, is_large, pins_above, pins_memory

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("setting", "device", "pins"),
    [
        ("auto", CPU, False),
        ("auto", CUDA, True),
        (True, CPU, torch.cuda.is_available()),  # a DataLoader only warns without a GPU
        (False, CUDA, False),
    ],
)
def test_memory_is_page_locked_for_gpus_unless_set(setting: Any, device: torch.device, pins: bool) -> None:
    assert pins_memory(LoaderConfig(pin_memory=setting), device) is pins


def test_small_tensors_are_page_locked_only_where_that_was_set() -> None:
    assert pins_above(LoaderConfig()) == 1 << 16
    assert pins_above(LoaderConfig(pin_memory=True)) < 0


def test_on_a_cpu_a_batch_stays_where_it_is() -> None:
    data = {"x": [torch.zeros(2)]}
    assert DeviceCopies(CPU).to_device(data) is data


def test_a_batch_is_large_by_its_largest_tensor() -> None:
    mebibyte = torch.empty(1 << 18)
    assert not is_large((mebibyte, mebibyte, "text")), "each of them is small"
    assert is_large({"deep": [mebibyte, torch.empty((1 << 18) + 1)]})
    assert not is_large("no tensor at all")
