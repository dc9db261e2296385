"""What is read of a run's directory."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from samestep.errors import RunDirError
from samestep.report.curves.history import labels, read_histories, read_history
from tests.unit.report.runs import write_run


def test_rows_become_a_series_for_each_metric(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "epoch": 0, "loss": 2.0, "lr": 0.1},
        {"step": 1, "epoch": 0, "loss": 1.0, "lr": 0.2, "skipped": True},
        {"step": 1, "samples_per_second": 10.5},
        {"step": 1, "val_loss": 0.1 + 0.2, "note": "text", "flag": True},
    ]
    found = read_history(write_run(tmp_path, rows), "mine")
    assert list(found.metrics) == ["epoch", "loss", "lr", "samples_per_second", "val_loss"]
    assert (found.metrics["loss"].steps, found.metrics["loss"].values) == ([0, 1], [2.0, 1.0])
    assert found.metrics["val_loss"].values == [0.1 + 0.2]
    assert found.skipped == [1]
    assert found.unread == 0


def test_lists_and_mappings_are_curves_of_their_own_if_they_are_short(tmp_path: Path) -> None:
    row = {"step": 0, "lr": [0.1, 0.01], "head": {"loss": {"a": 1.0}}, "matrix": [[1, 2], [3, 4]], "long": [0.0] * 17}
    found = read_history(write_run(tmp_path, [row]), "mine")
    assert list(found.metrics) == ["lr[0]", "lr[1]", "head/loss/a"]


def test_half_a_line_at_the_end_is_a_run_that_trains_and_others_are_counted(tmp_path: Path) -> None:
    good = {"step": 0, "loss": 1.0}
    run = write_run(tmp_path / "cut", [good], '{"step": 1, "lo')
    assert read_history(run, "cut").unread == 0
    run = write_run(tmp_path / "broken", [good], '{"st\n[1]\n{"loss": 3}\n{"step": true}\n{"step": 2, "loss": 3}\n')
    found = read_history(run, "broken")
    assert found.unread == 4
    assert found.metrics["loss"].steps == [0, 2]


def test_a_step_written_again_counts_as_written_last_and_steps_ascend(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": loss} for step, loss in [(0, 5.0), (2, 3.0), (1, 4.0), (2, 2.0)]]
    loss = read_history(write_run(tmp_path, rows), "mine").metrics["loss"]
    assert (loss.steps, loss.values) == ([0, 1, 2], [5.0, 4.0, 2.0])


def test_nan_and_infinity_are_values(tmp_path: Path) -> None:
    rows = [{"step": 0, "loss": math.nan}, {"step": 1, "loss": math.inf}]
    values = read_history(write_run(tmp_path, rows), "mine").metrics["loss"].values
    assert math.isnan(values[0])
    assert values[1] == math.inf


def test_what_is_no_run_is_refused_and_the_runs_in_it_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"metrics.jsonl cannot be read: .*Give a run's directory"):
        read_histories([tmp_path / "none"])
    for number in range(7):
        write_run(tmp_path / f"run{number}", [])
    with pytest.raises(RunDirError, match=r"Give the runs in it: .*run0, .*run4, \.\.\."):
        read_histories([tmp_path])


def test_whether_lower_is_better_is_the_configs_word_or_a_loss(tmp_path: Path) -> None:
    run = write_run(tmp_path, [])
    assert read_history(run, "mine").best is None
    (run / "config.json").write_text(json.dumps({"best": {"metric": "acc", "mode": "max"}}))
    found = read_history(run, "mine")
    assert [found.better(name) for name in ("acc", "val_loss", "loss/a", "loss_scale", "f1")] == [
        "max", "min", "min", None, None,
    ]  # fmt: skip


def test_labels_are_the_shortest_ends_that_differ(tmp_path: Path) -> None:
    def of(*names: str) -> list[str]:
        return labels([tmp_path / name for name in names])

    assert of("runs/mine") == ["mine"]
    assert of("a/mine", "b/mine", "b/other") == ["a/mine", "b/mine", "other"]
    assert of("a/x/mine", "b/x/mine") == ["a/x/mine", "b/x/mine"]
    assert of("mine", "mine/earlier/1") == ["mine", "mine/earlier/1"]
    assert labels([Path("/run"), Path("/a/run")]) != ["run", "run"]


def test_a_run_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", [{"step": 0, "loss": 1.0}])
    other = write_run(tmp_path / "other", [{"step": 0, "loss": 1.0}])
    found = read_histories([run, other, tmp_path / "other" / ".." / "mine"])
    assert [one.label for one in found] == ["mine", "other"]
