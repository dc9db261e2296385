"""What W&B calls a run is kept before W&B knows of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samestep.config.trackers import WandbConfig
from samestep.tracking.wandb_run import WandbRun


def test_a_kill_in_init_leaves_an_id_that_the_next_start_continues(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    kept: list[str] = []

    def init(**given: Any) -> None:
        assert kept == [given["id"]]
        raise KeyboardInterrupt

    tracker = WandbRun(WandbConfig())
    tracker._wandb = SimpleNamespace(init=init, Settings=lambda **given: None)
    run: Any = SimpleNamespace(name="mine", id=None, folder=tmp_path, params={}, tags={}, keep_id=kept.append)
    with pytest.raises(KeyboardInterrupt):
        tracker.start(run)
    assert len(kept) == 1
