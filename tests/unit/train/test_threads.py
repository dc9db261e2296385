"""The threads of a run belong to it: they are recorded, and kept when it is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import samestep
from samestep.errors import Stopped
from tests.unit.train.own_loops import settings, train, train_part


@pytest.fixture(autouse=True)
def threads_put_back() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def resumed(folder: Path, now: str | None, monkeypatch: pytest.MonkeyPatch) -> int:
    """A run with two threads by the environment, resumed with another request; its threads then."""
    config = settings(folder, distributed={"device": "cpu"})
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with pytest.raises(Stopped):
        train_part(config, 2)
    assert json.loads((folder / "plan.json").read_text())["threads_per_rank"] == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    if now is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", now)
    with samestep.start(config) as run:
        train(run)
        return torch.get_num_threads()


def test_a_resumed_run_keeps_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resumed(tmp_path, None, monkeypatch) == 2
    assert "2 threads per rank, as before" in capsys.readouterr().err


def test_another_number_is_taken_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resumed(tmp_path, "3", monkeypatch) == 3
    assert "threads_per_rank was 2, is 3" in capsys.readouterr().err


def test_nothing_set_is_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with samestep.start(settings(tmp_path, distributed={"device": "cpu"})) as run:
        assert torch.get_num_threads() == run.context.threads == 1


def test_a_run_that_has_ended_puts_the_threads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    with samestep.start(settings(tmp_path, distributed={"device": "cpu"})):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
