"""samestep bench scaling as a person types it, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.processes import samestep

TASKS = Path(__file__).with_name("bench_tasks.py")


@pytest.mark.requirement("003-T5-2", "003-T5-4", "003-R-2")
def test_a_slow_rank_of_a_task_is_found_by_name(tmp_path: Path) -> None:
    """Rank 1 sleeps in every lane."""
    config = tmp_path / "config.yaml"
    config.write_text(f"name: late\ntask: {TASKS}:Late\nsteps: 4\nglobal_batch: 16\nlanes: 2\n")
    files = ("--output", "scaling.json", "--report", "scaling.html")
    done = samestep("bench", "scaling", config, "--worlds", "2", "--mode", "strong", "--quick", *files, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert found["machine"]["task"] == f"{TASKS}:Late"
    assert found["machine"]["config"].startswith("sha256 ")
    rows = {row["variant"]: row for row in found["rows"]}
    assert rows.keys() == {"samestep", "ddp"}
    for loop, row in rows.items():
        assert (row["mode"], row["world"], row["backend"]) == ("strong", 2, "gloo")
        assert (row["global_batch"], row["lanes"]) == (16, 2)
        assert len(row["seconds"]) == 3
        assert row["low"] <= row["median"] <= row["high"]
        assert row["ratio_to_ddp"] is not None
        assert row["efficiency"] is None, "there is no smaller world"
        assert (row["phases"] is None) == (loop == "ddp")
    late = rows["samestep"]
    assert [one["rank"] for one in late["slow_ranks"]] == [1]
    assert late["ranks"][1]["compute"] >= 0.1
    assert late["phases"]["wait"]["median"] >= 0.02, "one of two ranks waits for most of 100 ms"
    assert all(one["memory_bytes"] > 1 << 20 for one in late["ranks"])
    host = late["ranks"][1]["host"]
    shown = " ".join(done.stdout.split())
    assert f"strong scaling, 2 ranks: rank 1 ({host}) computes" in shown
    assert "as long as the median rank" in (tmp_path / "scaling.html").read_text()
