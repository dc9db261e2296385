"""What a loss over the global batch reads of it is gathered, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samestep.data.batch import LaneBatch, Moment
from samestep.step.global_batch import GlobalBatch


class Rows:
    """Notes what was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def container(self, name: str, mine: dict[int, Any]) -> Any:
        first = next(iter(mine.values()))
        return first if isinstance(first, dict | tuple) else 0

    def gather(self, name: str, samples: Any, mine: dict[int, Any]) -> Any:
        self.asked.append(name)
        return torch.cat([mine[lane] for lane in sorted(mine)])


@pytest.mark.parametrize("kind", [dict, tuple])
def test_only_what_is_read_travels_and_only_once(kind: type) -> None:
    def data(lane: int) -> Any:
        parts = {"image": torch.zeros(2, 9), "label": torch.full((2,), lane)}
        return parts if kind is dict else tuple(parts.values())

    rows: Any = Rows()
    mine = [LaneBatch(lane, data(lane), (0, 1)) for lane in (0, 1)]
    found = GlobalBatch(rows, [2, 2], mine, Moment())
    key: Any = "label" if kind is dict else 1
    assert found.data[key].tolist() == [0, 0, 1, 1]
    assert found.data[key] is found.data[key]
    assert len(found.data) == 2
    assert rows.asked == [f"batch.data[{key!r}]"]
