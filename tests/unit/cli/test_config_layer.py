"""Recommendations as a config that includes another."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.cli.tune import Setting, refuse_layer, write_layer
from samestep.config import load_config
from samestep.errors import OutputError


def test_a_layer_includes_the_config_and_is_one(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    below = tmp_path / "deep" / "config.yaml"
    below.write_text("task: task.py:MyTask\nglobal_batch: 64\nepochs: 1\nlanes: 8\nparams: {lr: 1, width: 3}\n")
    path = tmp_path / "best.yaml"
    settings = [
        Setting("lanes", 4, ["lanes: 4: the\nmost", "another run"]),
        Setting("loader.workers", 2),
        Setting("params.lr", 0.5),
    ]
    write_layer(path, below, "samestep tune all", settings)
    found = load_config(path)
    assert (found.lanes, found.loader.workers, found.global_batch) == (4, 2, 64)
    assert found.params == {"lr": 0.5, "width": 3}
    assert "# lanes: 4: the most\n# another run\nlanes: 4" in path.read_text()
    assert "Recommended by samestep tune all" in path.read_text()
    with pytest.raises(OutputError, match="exists already, and is kept"):
        write_layer(path, below, "samestep tune all", settings)
    with pytest.raises(OutputError, match=r"end its name in \.yaml"):
        refuse_layer(tmp_path / "best.json")
    with pytest.raises(OutputError, match="there is no directory"):
        refuse_layer(tmp_path / "nowhere" / "best.yaml")
