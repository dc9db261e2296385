"""On a GPU: BatchNorm over the global batch, between ranks that share it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.running import assert_same, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TASKS = Path(__file__).parents[1] / "distributed" / "batchnorm_tasks.py"


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("task", ["Images", "Contrast"])
def test_it_is_the_run_of_one_rank_with_one_lane(task: str, world: int, tmp_path: Path) -> None:
    shared = {"device": "cuda", "backend": "gloo"}
    one, *several = [
        train(
            tmp_path, ranks, f"{TASKS}:{task}",
            global_batch=24, lanes=ranks, batchnorm="global", distributed=shared,
        )
        for ranks in (1, world, world)
    ]  # fmt: skip
    assert_same(several)
    assert several[0].record.losses == pytest.approx(one.record.losses, abs=1e-4)
    # A layer without running statistics evaluates by batches, which are as large as a lane.
    trained = {name: v for name, v in one.state.items() if not name.startswith("kept.")}
    for name, value in trained.items():
        torch.testing.assert_close(several[0].state[name], value, rtol=1e-3, atol=1e-3, msg=name)
