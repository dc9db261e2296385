"""Rows of values, on their way to files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from samestep.config import Config, load_config
from samestep.errors import RunDirError
from samestep.train.trackers import JsonLines, TensorBoard, Tracker, Trackers, open_trackers


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


def test_what_a_resumed_run_wrote_before_stays(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(2):
        tracker = JsonLines(path)
        tracker.write({"step": step})
        tracker.close()
    assert lines(path) == [{"step": 0}, {"step": 1}]


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


class Writer:
    """What we use of TensorBoard's writer."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.calls.append((name, value, step))

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def test_tensorboard_gets_the_numbers_of_a_row_by_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = TensorBoard.__new__(TensorBoard)
    writer = Writer()
    monkeypatch.setattr(tracker, "_writer", writer, raising=False)
    tracker.write({"step": 7, "loss": 0.5, "epoch": 1, "lr": [1, 2], "name": "x"})
    tracker.flush()
    tracker.close()
    assert writer.calls == [("loss", 0.5, 7), ("epoch", 1, 7), "flush", "close"]
