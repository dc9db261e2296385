"""samestep bench all as a person types it: a part that fails is named, and the others run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.processes import samestep

TASKS = Path(__file__).with_name("bench_tasks.py")


@pytest.mark.variation(
    "test_messages_of_two_and_four_ranks and test_parts_of_two_ranks_and_the_one_that_leaks: one after the other"
)
def test_a_part_that_fails_is_named_and_the_others_are_written(tmp_path: Path) -> None:
    document = {"task": f"{TASKS}:Nowhere", "global_batch": 8, "lanes": 2, "steps": 1}
    (tmp_path / "config.json").write_text(json.dumps(document))
    done = samestep(
        "bench", "all", "config.json", "--quick", "--worlds", "2", "--only", "memory,comm",
        "--output", "found", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "memory (" in done.stdout
    assert "has no class Nowhere" in " ".join(done.stdout.split())
    assert "1/2 samestep bench memory" in done.stderr
    assert [path.name for path in (tmp_path / "found").iterdir()] == ["comm.json"]
    assert json.loads((tmp_path / "found" / "comm.json").read_text())["kind"] == "comm"
