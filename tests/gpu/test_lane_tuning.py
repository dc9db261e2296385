"""What lanes cost on a GPU: widths and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samestep.config import load_config
from samestep.distributed.context import SingleProcessContext
from samestep.lane_tuning.choices import Comparison
from samestep.lane_tuning.measure import measure_lanes
from tests.distributed.running import settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_every_width_is_measured_with_its_memory(tmp_path: Path) -> None:
    given = load_config(
        settings("Everything", tmp_path / "run", params={"optimizer": "fused"}, drop_last=True)
    )
    with SingleProcessContext("cuda:0") as context:
        found = measure_lanes(given, context, Comparison((1, 4), (1, 4), rounds=2, steps=3))
    assert [(m.lanes, m.parallel) for m in found] == [(1, 1), (4, 1), (4, 4)]
    assert all(len(m.seconds) == 2 and not m.failed for m in found)
    assert all(m.peak_bytes and m.peak_bytes > 0 for m in found)
    assert {m.device for m in found} == {torch.cuda.get_device_name(0)}
