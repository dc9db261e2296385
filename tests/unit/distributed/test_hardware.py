"""What torch sees of this machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from samestep.distributed.hardware import detect_hardware, gpu_id


@pytest.mark.requirement("001-S2-1", "001-D-5")
def test_hardware_lists_the_gpus_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    hardware = detect_hardware({"COLAB_GPU": "2"})
    assert hardware.cuda_available
    assert hardware.devices == ("card 0", "card 1")
    assert hardware.platform.value == "colab"


@pytest.mark.parametrize(("built_for", "reason"), [(None, "is built without CUDA"), ("12.8", "but sees no GPU")])
def test_hardware_reports_why_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    hardware = detect_hardware({})
    assert (hardware.cuda_available, hardware.device_count) == (False, 0)
    assert reason in hardware.cuda.reason


def test_hardware_lists_the_backends_that_torch_was_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert detect_hardware({}).backends == ("gloo",)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert detect_hardware({}).backends == ("nccl", "gloo")


def test_by_default_the_environment_is_this_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    assert detect_hardware().platform.value == "kaggle"
    assert detect_hardware({}).platform.value == "local"


def test_a_gpu_is_known_by_its_uuid_or_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-7"))
    assert gpu_id(0) == "GPU-7"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    assert gpu_id(3) == "number 3"
