"""Rows of values, on their way to files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samestep.config import Config, load_config
from samestep.errors import RunDirError, TaskError
from samestep.tracking.contract import Tracker
from samestep.tracking.trackers import FigureFiles, JsonLines, RecentRows, Trackers, open_trackers
from tests.unit.tracking.running import a_figure


def config(**values: Any) -> Config:
    return load_config({"global_batch": 8, "epochs": 1, **values})


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_read_back_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    row = {"step": 3, "loss": 0.1 + 0.2, "bad": math.inf, "lr": [1e-300, 5e-324], "name": "ü"}
    tracker = JsonLines(path)
    tracker.write(row)
    tracker.flush()
    assert lines(path) == [row]
    tracker.close()


@pytest.mark.parametrize("call", ["write", "flush", "close"])
def test_a_full_disk_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    class Full:
        def fail(self, *given: Any) -> None:
            raise OSError(28, "No space left on device")

        write = flush = close = fail

    path = tmp_path / "metrics.jsonl"
    tracker = JsonLines(path)
    tracker.close()
    monkeypatch.setattr(tracker, "_file", Full())
    message = f"{path} could not be written: No space left on device. Free space"
    with pytest.raises(RunDirError, match=message):
        getattr(tracker, call)(*([{"step": 0}] if call == "write" else []))


def test_all_trackers_get_every_call() -> None:
    class Noting(Tracker):
        def __init__(self, name: str) -> None:
            self._name = name

        def write(self, row: dict[str, Any]) -> None:
            calls.append((self._name, row))

        def flush(self) -> None:
            calls.append((self._name, "flush"))

        def close(self) -> None:
            calls.append((self._name, "close"))

    calls: list[Any] = []
    every = Trackers([Noting("a"), Noting("b")])
    every.write({"step": 1})
    every.flush()
    every.close()
    assert calls == [(n, what) for what in ({"step": 1}, "flush", "close") for n in "ab"]


def test_only_rank_0_opens_a_file(tmp_path: Path) -> None:
    other = open_trackers(config(), tmp_path, is_main=False)
    other.write({"step": 0})
    other.close()
    assert list(tmp_path.iterdir()) == []
    main = open_trackers(config(), tmp_path, is_main=True)
    main.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensors_and_numpy_values_are_written_as_numbers(tmp_path: Path) -> None:
    trackers = Trackers([JsonLines(tmp_path / "metrics.jsonl")])
    row = {"step": 1, "scalar": torch.tensor(0.5), "numpy": np.float32(2), "list": torch.arange(2)}
    trackers.write({**row, "nested": {"a": (torch.tensor(1),)}})
    trackers.close()
    expected = {"step": 1, "scalar": 0.5, "numpy": 2.0, "list": [0, 1], "nested": {"a": [1]}}
    assert lines(tmp_path / "metrics.jsonl") == [expected]
    with pytest.raises(TaskError, match="odd is a object: trackers take numbers"):
        trackers.write({"step": 1, "odd": object()})


def test_ranks_without_trackers_wait_for_no_device() -> None:
    Trackers([]).write({"step": 1, "value": torch.empty((), device="meta")})


def test_figures_are_files_and_no_rows(tmp_path: Path) -> None:
    trackers = open_trackers(config(), tmp_path, is_main=True)
    trackers.write({"step": 7, "val/confusion": a_figure()})
    trackers.write({"step": 8, "loss": 1.0, "curve": a_figure()})
    trackers.flush()
    trackers.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 8, "loss": 1.0}]
    found = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert found == ["curve-00000008.png", "val-confusion-00000007.png"]
    assert (tmp_path / "figures" / found[0]).read_bytes().startswith(b"\x89PNG")


def test_a_figure_that_cannot_be_written_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "figures").write_text("in the way")
    with pytest.raises(RunDirError, match=r"curve-00000000\.png could not be written"):
        FigureFiles(tmp_path / "figures").write({"step": 0, "curve": a_figure()})


def test_what_rank_0_may_not_have_flushed_is_kept_for_two_steps() -> None:
    recent = RecentRows()
    recent.write({"step": 0, "loss": 1.0})
    recent.flush()
    recent.reached()
    assert [row["step"] for row in recent.kept()] == [0], "rank 0 may have died before its flush"
    recent.write({"step": 1, "loss": 1.0})
    recent.reached()
    assert [row["step"] for row in recent.kept()] == [1], "it took part in the next step"
    recent.reached()
    assert [row["step"] for row in recent.kept()] == [1], "never flushed"


def test_a_resumed_run_gets_the_rows_that_rank_0_took_with_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "loss": 4.0}\n{"step": 1, "loss": 3.0}\n{"step": 1, "rate": 7}\n')
    kept = [
        {"step": 1, "loss": 3.0},
        {"step": 1, "rate": 8},  # the other rank's own
        {"step": 1, "val_loss": 5.0},
        {"step": 2, "loss": 2.0},
    ]
    open_trackers(config(), tmp_path, is_main=True, start=3, rows=kept).close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [
        {"step": 0, "loss": 4.0},
        {"step": 1, "loss": 3.0},
        {"step": 1, "rate": 7},
        {"step": 1, "val_loss": 5.0},
        {"step": 2, "loss": 2.0},
    ]
