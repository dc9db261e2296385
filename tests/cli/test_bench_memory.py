"""samestep bench memory as a person types it, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samestep.bench.memory import PARTS
from tests.cli.processes import samestep

TASKS = Path(__file__).with_name("bench_tasks.py")
WEIGHTS = 4 * (4 * 2 + 2)


def write_config(folder: Path, task: str) -> None:
    document = {
        "task": f"{TASKS}:{task}", "global_batch": 8, "lanes": 2, "steps": 1, "name": "measured",
        "optimizer": {"name": "adamw", "lr": 0.1},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(document))


@pytest.mark.requirement("003-T5-6", "003-T5-7")
def test_parts_of_two_ranks_and_the_one_that_leaks(tmp_path: Path) -> None:
    write_config(tmp_path, "Leaking")
    done = samestep(
        "bench", "memory", "config.json", "params.rank=1", "params.kilobytes=512", "--worlds", "2",
        "--lanes-per-rank", "1,2", "--steps", "120", "--json", "--report", "memory.html",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["machine"]["task"] == "Leaking"
    parts = {(row["lanes_per_rank"], row["part"]): row for row in found["rows"] if "part" in row}
    assert parts.keys() == {(lanes, part) for lanes in (1, 2) for part in PARTS}
    for row in parts.values():
        assert [rank["rank"] for rank in row["ranks"]] == [0, 1]
        check_known(row)
    leaks = [row["leak"] for row in found["rows"] if "leak" in row]
    assert {leak["rank"] for leak in leaks if leak["leaks"]} == {1}
    assert {leak["memory"] for leak in leaks} >= {"tensors", "resident"}
    grows = {leak["rank"]: leak for leak in leaks if leak["memory"] == "tensors"}
    assert not grows[0]["leaks"]
    assert grows[1]["leaks"]
    assert grows[1]["slope_bytes_per_step"] == 512 * 1024
    assert "LEAK: rank 1 of 2" in (tmp_path / "memory.html").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "memory.html"}


def check_known(row: dict[str, Any]) -> None:
    """Of the linear layer and AdamW's two moments."""
    expected = {"weights": WEIGHTS, "optimizer": 2 * WEIGHTS, "buffers": 0}
    if row["part"] in expected:
        # The optimizer's counts of steps are numbers, too.
        assert 0 <= row["measured_bytes"] - expected[row["part"]] <= 16, row


@pytest.mark.variation("test_parts_of_two_ranks_and_the_one_that_leaks: of one process")
def test_lanes_of_one_process(tmp_path: Path) -> None:
    write_config(tmp_path, "Plain")
    done = samestep(
        "bench", "memory", "config.json", "--lanes-per-rank", "1,4", "--steps", "0", "--output",
        "memory.json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "On 1 rank, 4 lanes a rank hold" in " ".join(done.stdout.split())
    rows = json.loads((tmp_path / "memory.json").read_text())["rows"]
    sets = {1: 1, 4: 3}
    for row in rows:
        check_known(row)
        if row["part"] == "gradients":
            expected = sets[row["lanes_per_rank"]] * WEIGHTS
            assert expected <= row["measured_bytes"] <= expected + 32, "and the lanes' losses"
    assert not any("leak" in row for row in rows)
