"""Which number format a run computes in, and why; what the config sets in vain."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samestep.config import load_config
from samestep.optim.precision import choose_precision
from samestep.run.plan_report import without_effect

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("asked", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_what_is_asked_for_is_taken(asked: str, device: torch.device) -> None:
    chosen = choose_precision(asked, device)
    assert (chosen.kind, chosen.reason, chosen.device) == (asked, f"precision: {asked}", device)


def test_auto_stays_with_fp32_on_a_cpu() -> None:
    chosen = choose_precision("auto", CPU)
    assert chosen.kind == "fp32"
    assert "CPU" in chosen.reason


@pytest.mark.parametrize(
    ("capability", "kind", "needs"),
    [
        ((9, 0), "bf16", "bf16 needs 8.0"),
        ((8, 0), "bf16", "bf16 needs 8.0"),
        ((7, 5), "fp16", "bf16 needs 8.0, fp16 with tensor cores 7.0"),
        ((7, 0), "fp16", "bf16 needs 8.0, fp16 with tensor cores 7.0"),
        ((6, 1), "fp32", "fp16 with tensor cores needs 7.0"),
    ],
)
def test_auto_goes_by_what_the_gpu_computes_in_and_says_so(
    capability: tuple[int, int], kind: str, needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Card")
    chosen = choose_precision("auto", GPU)
    assert chosen.kind == kind
    number = ".".join(map(str, capability))
    assert f"Some Card has compute capability {number}" in chosen.reason
    assert needs in chosen.reason


@pytest.mark.parametrize(
    ("kind", "computed"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_forward_is_in_the_precision_and_backward_outside_of_it(kind: str, computed: torch.dtype) -> None:
    precision = choose_precision(kind, CPU)
    a = torch.ones(2, 2)
    with precision.forward():
        assert (a @ a).dtype == computed == precision.dtype
        with precision.backward():
            assert (a @ a).dtype == torch.float32
        assert (a @ a).dtype == computed
    assert (a @ a).dtype == torch.float32


@pytest.mark.parametrize(
    ("values", "device", "told"),
    [
        ({"precision": "tf32"}, CPU, ["precision: tf32 has no effect on cpu"]),
        ({"precision": "tf32"}, GPU, []),
        ({"loss_scale": {"init": 8.0}}, CPU, ["loss_scale has no effect with precision: fp32"]),
        ({"loss_scale": {"init": 8.0}, "precision": "fp16"}, CPU, []),
        ({"loss_scale": {"init": 8.0}, "precision": "auto"}, CPU, []),
        ({"clip": {"norm": 1.0, "memory": 0.5}}, CPU, ["clip.memory has no effect"]),
        ({"clip": {"adaptive": 2.0, "memory": 0.5}}, CPU, []),
        ({}, CPU, []),
    ],
)
def test_what_is_set_in_vain_is_said(values: dict[str, Any], device: torch.device, told: list[str]) -> None:
    config = load_config({"task": "a.py:B", "epochs": 1, "global_batch": 8, **values})
    found = without_effect(config, choose_precision(config.precision, device))
    assert len(found) == len(told)
    assert all(line.startswith(words) for line, words in zip(found, told, strict=True))
