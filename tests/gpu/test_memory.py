"""What a rank's gradients take of a GPU, and what happens when it is too small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from samestep.errors import OutOfMemory
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH, LAYERS, STEPS = 1024, 12, 4


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _data() -> TensorDataset:
    return TensorDataset(torch.randn(8 * STEPS, WIDTH), torch.randn(8 * STEPS, WIDTH))


def _peak_of_bits(folder: str) -> int:
    import samestep

    config = {
        "global_batch": 8, "lanes": 2, "steps": STEPS, "run_dir": folder, "speed": {"graph": False},
        "checkpoint": {"enabled": False}, "distributed": {"device": "cuda", "backend": "gloo"},
    }  # fmt: skip
    with samestep.start(config) as run:
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model, optimizer = run.prepare(model, optimizer)
        for step in run.steps(_data()):
            if step.index == 2:
                torch.cuda.reset_peak_memory_stats()
            step.train(lambda batch: ((model(batch.x) - batch.y).square().sum(), len(batch)))
        return torch.cuda.max_memory_allocated()


def _peak_of_ddp() -> int:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(_model().cuda(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = _data()
    for number in range(STEPS):
        if number == 2:
            torch.cuda.reset_peak_memory_stats()
        x, y = (tensor[4 * number : 4 * number + 4].cuda() for tensor in data.tensors)
        optimizer.zero_grad()
        (model(x) - y).square().sum().backward()
        optimizer.step()
    peak = torch.cuda.max_memory_allocated()
    dist.destroy_process_group()
    return peak


@pytest.mark.requirement("003-T5-6")
def test_one_lane_a_rank_takes_no_more_memory_than_plain_ddp(tmp_path: Path) -> None:
    ours = max(run_ranks(_peak_of_bits, 2, str(tmp_path / "run")))
    theirs = max(run_ranks(_peak_of_ddp, 2))
    print(f"peak memory of bits {ours / 2**20:.0f} MB, of DDP {theirs / 2**20:.0f} MB")
    assert ours <= 1.1 * theirs


def _crowded(folder: str, memory: dict[str, Any]) -> str:
    """Train with memory for a part of a lane only; what was said."""
    import samestep

    torch.cuda.init()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1000 * 2**20 / whole)
    config = {
        "global_batch": 1024, "lanes": 1, "steps": 3, "run_dir": folder, "memory": memory,
        "checkpoint": {"enabled": False}, "distributed": {"device": "cuda"},
    }  # fmt: skip
    try:
        with samestep.start(config) as run:
            model = nn.Sequential(nn.Linear(64, 1 << 18), nn.GELU(), nn.Linear(1 << 18, 1, bias=False))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, fused=True)
            model, optimizer = run.prepare(model, optimizer)
            data = TensorDataset(torch.randn(1024, 64), torch.randn(1024, 1))
            for step in run.steps(data):
                step.train(lambda b: ((model(b.x) - b.y).square().sum(), len(b)))
    except OutOfMemory as error:
        return str(error)
    return (Path(folder) / "logs" / "rank-0.log").read_text()


def test_a_lane_that_is_too_large_is_named_or_cut(tmp_path: Path) -> None:
    said = run_ranks(_crowded, 1, str(tmp_path / "whole"), {})[0]
    assert "1024 samples in a lane. Set memory.lane_split: auto" in said
    said = run_ranks(_crowded, 1, str(tmp_path / "cut"), {"lane_split": "auto"})[0]
    assert "micro-batches of" in said
