"""On a GPU: a loss over the whole global batch at any size, and the memory that it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from tests.distributed.running import assert_same, train
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TASKS = Path(__file__).parents[1] / "distributed" / "contrastive_tasks.py"
SHARED = {"device": "cuda", "backend": "gloo"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "views, BatchNorm, dropout": ("Views", {"precision": "bf16"}),
    "shared rows": ("Shared", {"precision": "fp16", "loss_scale": {"interval": 3}}),
    "micro-batches": ("WithProxies", {"memory": {"lane_split": 2}}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_same_at_any_size(case: str, tmp_path: Path) -> None:
    task, values = CASES[case]
    runs = [train(tmp_path, world, f"{TASKS}:{task}", distributed=SHARED, **values) for world in (1, 2, 4)]
    assert_same(runs)


def test_activations_kept_and_computed_again_give_the_same_bits(tmp_path: Path) -> None:
    runs = [
        train(
            tmp_path / str(again), 1, f"{TASKS}:Views", contrastive={"recompute": again},
            precision="bf16", distributed=SHARED,
        )
        for again in (True, False, "auto")
    ]  # fmt: skip
    assert_same(runs)


def _peak(folder: str, batch: int, recompute: bool) -> int:
    """The most bytes of a step with lanes of 256 samples."""
    config = {
        "global_batch": batch, "lanes": batch // 256, "steps": 3, "run_dir": folder,
        "contrastive": {"recompute": recompute}, "checkpoint": {"enabled": False},
        "distributed": {"device": "cuda"},
    }  # fmt: skip
    with samestep.start(config) as run:
        model = nn.Sequential(
            nn.Linear(16, 8192), *(nn.Sequential(nn.GELU(), nn.LayerNorm(8192)) for _ in range(8)), nn.Linear(8192, 32)
        )
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3, fused=True))
        x, y = torch.randn(batch, 16), torch.arange(batch) % 10
        for step in run.steps(TensorDataset(x, y)):
            torch.cuda.reset_peak_memory_stats()
            step.train_global(
                lambda lane: model(lane.x), lambda z, whole: samestep.losses.supcon(z, whole.y, rows_at_once=128)
            )
        return torch.cuda.max_memory_allocated()


def test_memory_is_that_of_a_lane_whatever_the_batch(tmp_path: Path) -> None:
    small, large, kept = (
        run_ranks(_peak, 1, str(tmp_path / f"{batch}-{again}"), batch, again)[0]
        for batch, again in ((512, True), (8192, True), (8192, False))
    )
    assert large < 1.5 * small
    assert kept > 4 * large
