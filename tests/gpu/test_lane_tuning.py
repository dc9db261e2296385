"""What lanes cost on a GPU: widths and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samestep.bench.tuning.timed import Timed
from samestep.bench.tuning.timing import time_variants
from samestep.bench.tuning.variants import lane_variants
from samestep.config import load_config
from samestep.distributed.context import SingleProcessContext
from tests.distributed.running import settings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_every_width_is_measured_with_its_memory(tmp_path: Path) -> None:
    given = load_config(settings("Everything", tmp_path / "run", params={"optimizer": "fused"}, drop_last=True))
    with SingleProcessContext("cuda:0") as context:
        document = time_variants(given, context, lane_variants((1, 4), (1, 4), 1), 2, 3)
    found = [Timed.read(row) for row in document.rows]
    labels = ["1 lane, 1 at once", "4 lanes, 1 at once", "4 lanes, 4 at once"]
    assert [one.label for one in found] == labels
    assert all(len(one.seconds) == 2 and not one.failed for one in found)
    assert all(one.peak_bytes and one.peak_bytes > 0 for one in found)
    assert document.machine["device"] == torch.cuda.get_device_name(0)
