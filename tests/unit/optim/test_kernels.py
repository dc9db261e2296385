"""Which kernels a GPU may choose: set for a run, and put back after it. No GPU is needed to set them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from samestep import run_setup
from samestep.config import load_config
from samestep.distributed.context import SingleProcessContext
from samestep.optim.kernels import Deterministic, choose_kernels, put_back, torch_settings
from samestep.optim.precision import choose_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch_settings()
    yield
    put_back(before)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.parametrize(("kind", "rounds"), [("fp32", False), ("tf32", True)])
def test_matrix_products_on_a_gpu_round_to_tf32_only_if_requested(kind: str, rounds: bool) -> None:
    torch.set_float32_matmul_precision("medium")
    undo = choose_kernels(choose_precision(kind, GPU), deterministic=False)
    assert torch.get_float32_matmul_precision() == ("high" if rounds else "highest")
    assert torch.backends.cudnn.allow_tf32 is rounds
    assert not torch.are_deterministic_algorithms_enabled()
    undo()
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize(("deterministic", "warns"), [(True, False), ("warn", True)])
def test_deterministic_kernels_are_put_back(deterministic: Deterministic, warns: bool) -> None:
    before = torch_settings()
    undo = choose_kernels(choose_precision("bf16", GPU), deterministic)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled() is warns
    assert torch.backends.cudnn.deterministic
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ, "every product would parse it"
    assert torch_settings()["fill"] is False
    undo()
    undo()
    assert torch_settings() == before


def test_a_workspace_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    choose_kernels(choose_precision("fp32", GPU), deterministic=True)()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_on_a_cpu_nothing_is_changed() -> None:
    before = torch_settings()
    choose_kernels(choose_precision("tf32", CPU), deterministic=True)
    assert torch_settings() == before


def test_a_context_that_is_closed_has_put_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config({"task": "t.py:T", "global_batch": 8, "epochs": 1})
    context = SingleProcessContext()
    context.device = GPU
    before = torch_settings()
    # The GPU's generators cannot be had here.
    monkeypatch.setattr(run_setup, "RngStreams", lambda seed, device: None)
    run_setup.RunSetup.create(config, context)
    assert torch.are_deterministic_algorithms_enabled()
    context.close()
    assert torch_settings() == before
