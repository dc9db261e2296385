"""What tests of trackers share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samestep.tracking.contract import TrackedRun


def tracked(
    folder: Path, *, start: int = 0, id: str | None = None, keep_id: Callable[[str], None] = lambda text: None
) -> TrackedRun:
    params = {"seed": 0, "params.hidden": 8}
    return TrackedRun("digits", folder, params, {"team": "vision"}, start, id, keep_id)


def a_figure() -> Any:
    figures = pytest.importorskip("matplotlib.figure")
    made = figures.Figure(figsize=(1, 1))
    made.subplots().plot([1, 2])
    return made
