"""What a run adds its lanes up with, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from samestep.config import load_config
from samestep.distributed.collectives import SoloCollectives
from samestep.distributed.health.activity import Activity
from samestep.errors import LaunchError
from samestep.reduce.build import LaneReduction, _sync_batchnorm, build_reduction
from samestep.reduce.gradients import LaneSum, OneLaneSum
from samestep.reduce.scaling import Scaling

CPU = torch.device("cpu")


def build(*modules: nn.Module, lanes: int = 2, **values: Any) -> LaneReduction:
    config = load_config({"global_batch": 8, "lanes": lanes, "epochs": 1, **values})
    params = [pair for module in modules for pair in module.named_parameters()]
    units = [range(1)] if config.same == "samples" else [range(lanes)]
    collectives = SoloCollectives(Activity())
    return build_reduction(config, collectives, CPU, modules, params, units, Scaling())


@pytest.mark.parametrize("same", ["bits", "rounding", "samples"])
def test_one_process_wraps_nothing_at_any_level(same: str) -> None:
    model = nn.BatchNorm1d(2)
    reduction = build(model, same=same)
    assert reduction.model is model
    assert type(reduction.gradients) is (OneLaneSum if same == "samples" else LaneSum)


@pytest.mark.parametrize(("same", "averages"), [("bits", True), ("rounding", True), ("samples", False)])
def test_fused_lanes_leave_buffers_to_the_model(same: str, averages: bool) -> None:
    model = nn.BatchNorm1d(2)
    buffers = build(model, same=same).buffers
    buffers.begin_step()
    for _ in range(2):
        buffers.enter_lane()
        assert model.running_mean is not None
        model.running_mean += 1
    assert model.running_mean.tolist() == ([1, 1] if averages else [2, 2])


def test_sync_batchnorm_is_refused_on_a_cpu() -> None:
    with pytest.raises(LaunchError, match=r"distributed\.sync_batchnorm is true but .* CPU"):
        _sync_batchnorm(nn.BatchNorm1d(2), CPU)
