"""On a GPU, same: bits takes deterministic kernels, and names what has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.running import assert_same, settings, train, train_rank
from tests.ranks import answers_of_ranks, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TASKS = Path(__file__).with_name("attention.py")
SHARED = {"device": "cuda", "backend": "gloo"}


def of(name: str, **values: Any) -> dict[str, Any]:
    given = {"global_batch": 16, "steps": 6, "epochs": None, "distributed": SHARED, **values}
    return {"task": f"{TASKS}:{name}", **given}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_attention_has_the_same_bits_in_every_run_and_at_any_size(precision: str, tmp_path: Path) -> None:
    worlds = (1, 1, 2, 4)
    assert_same([train(tmp_path, w, **of("Attention", precision=precision)) for w in worlds])


@pytest.mark.parametrize("lanes", [1, 8])
def test_attention_is_captured_as_a_graph_with_the_bits_of_eager(lanes: int, tmp_path: Path) -> None:
    values = {"precision": "bf16", "lanes": lanes, "steps": 12}
    runs = [train(tmp_path, 1, **of("Attention", speed={"graph": graph}, **values)) for graph in (False, True, True)]
    assert_same(runs)


def test_an_operation_without_a_deterministic_form_is_named(tmp_path: Path) -> None:
    config = settings(folder=tmp_path / "run", **of("Pooling"))
    ((ok, text),) = answers_of_ranks(train_rank, 1, config, str(tmp_path / "record"))
    assert not ok
    assert "NotDeterministic: adaptive_avg_pool2d_backward_cuda in step 0 gives other bits" in text
    assert "deterministic: warn" in text


@pytest.mark.parametrize("values", [{"deterministic": "warn"}, {"deterministic": False}])
def test_it_trains_if_that_is_requested(values: dict[str, Any], tmp_path: Path) -> None:
    assert train(tmp_path, 1, **of("Pooling", **values)).record.steps == 6


def _settings_after(config: dict[str, Any], record: str) -> tuple[bool, bool]:
    train_rank(config, record)
    return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic


def test_torch_is_left_as_it_was(tmp_path: Path) -> None:
    config = settings(folder=tmp_path / "run", **of("Attention", steps=2))
    assert run_ranks(_settings_after, 1, config, str(tmp_path / "record")) == [(False, False)]
