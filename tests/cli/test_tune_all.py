"""samestep tune all as a person types it, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samestep.cli.starter import write_starter
from samestep.config import load_config
from tests.cli.processes import samestep

TINY = ("--quick", "--rounds", "1", "--steps", "1")


@pytest.mark.requirement("002-D-2")
def test_it_measures_and_recommends(tmp_path: Path) -> None:
    write_starter(tmp_path / "mine")
    config, best = tmp_path / "mine" / "config.yaml", tmp_path / "best.yaml"
    before = sorted(tmp_path.rglob("*"))
    done = samestep("tune", "all", config, *TINY, "--write", best, "--json", cwd=tmp_path, seconds=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {row["label"] for row in found["measured"]} >= {"as configured", "bf16", "1 worker"}
    for row in (*found["layouts"], *found["measured"]):
        assert row["failed"] or row["seconds"][0] > 0, row
    assert [one["topic"] for one in found["advice"]] == [
        "ranks and threads", "sharding", "lanes", "loader workers", "precision", "CUDA graphs", "global batch",
    ]  # fmt: skip
    assert found["machine"]["device_bytes"] > 0
    assert "ranks and threads: 1 rank" in done.stderr
    if found["overrides"]:
        written = load_config(best)
        assert all(_value(written, key) == value for key, value in found["overrides"].items())
        best.unlink()
    left = [path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts]
    assert sorted(left) == before, "nothing is saved"


def _value(config: object, key: str) -> object:
    for name in key.split("."):
        config = getattr(config, name)
    return config
