"""samestep bench loader as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.processes import samestep

TASKS = Path(__file__).with_name("bench_tasks.py")


def test_a_slow_dataset_is_found_and_workers_are_recommended(tmp_path: Path) -> None:
    document = {
        "task": f"{TASKS}:SlowData", "params": {"seconds": 0.02}, "global_batch": 8, "lanes": 4,
        "steps": 1, "optimizer": {"name": "sgd", "lr": 0.1},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(document))
    done = samestep(
        "bench", "loader", "config.json", "--workers", "0,4", "--prefetch", "2", "--rounds", "3",
        "--output", "loader.json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "loader.json").read_text())["rows"]
    alone, ahead = rows
    # Eight samples that sleep 20 ms each: one after the other, or two by each of four workers.
    assert alone["median"] >= 0.16
    assert 0.04 <= ahead["median"] < alone["median"]
    assert (alone["bottleneck"], alone["recommended"]) == (True, False)
    assert ahead["recommended"]
    said = " ".join(done.stdout.split())
    assert "On 1 rank data takes" in said
    assert "Set loader.workers=4 loader.prefetch=2" in said
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "loader.json"}


def test_a_mistake_is_named(tmp_path: Path) -> None:
    done = samestep("bench", "loader", "--workers", "0,-1", cwd=tmp_path)
    assert done.returncode == 2
    assert "--workers is '-1': give numbers" in done.stderr
