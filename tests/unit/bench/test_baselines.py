"""The loop with DistributedDataParallel, and what it cannot train."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.bench.baselines import LoopContext, Unsupported, open_ddp
from samestep.bench.scaling import refuse_small_data
from samestep.bench.workloads import NamedWorkload
from samestep.config import load_config
from samestep.distributed.context import SingleProcessContext
from samestep.distributed.hardware import detect_hardware
from samestep.errors import TaskError


def loop(folder: Path, stack: ExitStack, **changes: Any) -> LoopContext:
    config = load_config({"global_batch": 32, "lanes": 2, "steps": 1, **changes})
    task, context = NamedWorkload("conv", "small", 32), SingleProcessContext(torch.device("cpu"))
    return LoopContext(task, config, context, detect_hardware(), folder, stack)


@pytest.mark.parametrize("clip", [{}, {"norm": 1.0}, {"value": 0.1}])
def test_it_trains_without_an_end(tmp_path: Path, clip: dict[str, Any]) -> None:
    with ExitStack() as stack:
        open_ddp(loop(tmp_path, stack, clip=clip))(70)  # more than an epoch


def test_what_torch_does_not_clip_is_left_out_before_the_first_step(tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(Unsupported, match="no function that clips"):
        open_ddp(loop(tmp_path, stack, clip={"norm": 1.0, "per_group": True}))


def test_data_without_a_whole_step_is_refused_with_what_helps_here() -> None:
    refuse_small_data(NamedWorkload("mlp", "small", 32), 64)
    with pytest.raises(TaskError, match=r"takes 1000000: use more data, a smaller global_batch, or --mode strong"):
        refuse_small_data(NamedWorkload("mlp", "small", 32), 1_000_000)
