"""DistributedDataParallel as it is wrapped here."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from samestep.config import DistributedConfig
from samestep.reduce.ddp import wrap


def test_the_group_is_freed_after_the_reducer(tmp_path: Path) -> None:
    """The other way round, the end of a run can hang: the reducer ends gloo's threads with the interpreter lock."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = wrap(nn.Linear(2, 1), DistributedConfig(), torch.device("cpu"))
        model(torch.ones(1, 2)).sum().backward()
        freed: list[str] = []
        weakref.finalize(model.reducer, freed.append, "reducer")
        weakref.finalize(model.process_group, freed.append, "group")
    finally:
        dist.destroy_process_group()
    assert freed == []
    del model
    gc.collect()
    assert freed == ["reducer", "group"]
