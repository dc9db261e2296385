"""Saves and restores by hand: bandwidth, ratios, and whose folders are removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samestep.bench.builtin import width_of_state
from samestep.bench.checkpoint_report import bandwidth, cells, verdict
from samestep.cli.bench.measurements import folder_in
from samestep.errors import PlanError


def row(action: str, median: float, size: int = 100 << 20, **fields: Any) -> dict[str, Any]:
    return {
        "action": action, "world": 2, "backend": "gloo", "bytes": size, "seconds": [median] * 3,
        "median": median, "low": median, "high": median, **fields,
    }  # fmt: skip


ROWS = [
    row("torch.save", 0.5), row("pause", 0.05), row("save", 2.0), row("step", 0.1, 0),
    row("pause, asynchronous: false", 1.0), row("step beside a save", 0.15, 0),
    row("restore", 0.25, saved_by=2), row("restore", 0.3, saved_by=1),
]  # fmt: skip


def test_the_verdict_compares_with_torch_save() -> None:
    assert verdict(ROWS) == (
        "On 2 ranks, a save of 100 MB pauses training for 50 ms, 0.1x torch.save's 500 ms; it is on disk after "
        "2 s, and restored in 250 ms. A step takes 1.5x as long while it is written."
    )


def test_bandwidth_is_of_what_moves_bytes() -> None:
    assert bandwidth(ROWS[2]) == 50 << 20
    assert bandwidth(ROWS[1]) is None
    shown = cells(ROWS)
    assert shown[2][-1] == "50 MB/s"
    assert shown[3][-2:] == ("-", "-")
    assert shown[7][0] == "restore, saved by 1 rank"


def test_only_our_own_folder_is_removed(tmp_path: Path) -> None:
    (tmp_path / "samestep-bench-mine").mkdir()
    with folder_in(tmp_path) as folder:
        (folder / "deep").mkdir()
        assert folder.parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["samestep-bench-mine"]
    with pytest.raises(PlanError, match="no folder can be made in it"), folder_in(tmp_path / "no"):
        pass


def test_the_built_in_state_has_the_size_that_was_asked_for() -> None:
    """Eight times the square of the width, three times, in float32."""
    assert width_of_state(96) == 1000
