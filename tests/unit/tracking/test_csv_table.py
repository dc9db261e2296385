"""metrics.csv."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from samestep.config import load_config
from samestep.tracking.trackers import Trackers, open_trackers

CONFIG = load_config({"global_batch": 8, "epochs": 1, "trackers": {"csv": True}})


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def write(trackers: Trackers, *rows: dict[str, Any]) -> None:
    for row in rows:
        trackers.write(row)
    trackers.flush()


def test_every_name_has_a_column_and_floats_are_in_full(tmp_path: Path) -> None:
    trackers = open_trackers(CONFIG, tmp_path, is_main=True)
    write(trackers, {"step": 0, "loss": 0.1 + 0.2, "lr": [1e-300, 0.5]})
    write(trackers, {"step": 1, "loss": math.inf, "lr": [1.0, 2.0]})
    write(trackers, {"step": 1, "val": {"acc": 0.5}, "note": 'a, "b"\nc'})
    write(trackers, {"step": 2, "loss": math.nan})
    trackers.close()
    rows = table(tmp_path)
    assert list(rows[0]) == ["step", "loss", "lr/0", "lr/1", "val/acc", "note"]
    assert [row["step"] for row in rows] == ["0", "1", "1", "2"]
    assert float(rows[0]["loss"]) == 0.1 + 0.2
    assert (rows[0]["lr/0"], rows[1]["loss"], rows[3]["loss"]) == ("1e-300", "inf", "nan")
    assert (rows[2]["val/acc"], rows[2]["note"], rows[2]["loss"]) == ("0.5", 'a, "b"\nc', "")


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    trackers = open_trackers(CONFIG, tmp_path, is_main=True)
    write(trackers, *({"step": step, "loss": 1.0} for step in range(3)))
    trackers.close()
    metrics = tmp_path / "metrics.jsonl"  # RunDir.forget_after
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:1]))
    trackers = open_trackers(CONFIG, tmp_path, is_main=True, start=1)
    write(trackers, {"step": 1, "loss": 2.0})
    trackers.close()
    assert [(row["step"], row["loss"]) for row in table(tmp_path)] == [("0", "1.0"), ("1", "2.0")]


def test_a_table_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").mkdir()
    trackers, warnings = open_trackers(CONFIG, tmp_path, is_main=True), list[str]()
    trackers.warn_with(warnings.append)
    write(trackers, {"step": 0, "loss": 1.0})
    write(trackers, {"step": 1, "loss": 1.0})
    trackers.close()
    assert len(warnings) == 1
    assert "trackers.csv failed" in warnings[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
