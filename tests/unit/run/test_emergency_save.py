"""What ends a survivor's save, and what it leaves alone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from samestep.errors import CheckpointError
from samestep.run import emergency_save as survivors
from samestep.run.emergency_save import _DeadlineFiles, _one_at_a_time
from samestep.run.run_dir import RunDir, holder_of
from tests.unit.checkpoint.checkpoints import manifest


def test_a_disk_that_takes_too_long_ends_the_save(tmp_path: Path) -> None:
    from samestep.checkpoint.format import write_files

    late = _DeadlineFiles(time.monotonic() - 1)
    with pytest.raises(TimeoutError, match="the disk took longer than 10 s"):
        write_files(late, tmp_path / "x", {"w": torch.ones(2)}, {}, manifest())


def test_large_files_reach_the_disk_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(survivors, "_SYNCED_AT_ONCE", 8)
    monkeypatch.setattr(survivors.os, "fsync", synced.append)
    with _DeadlineFiles(time.monotonic() + 60).open_new(tmp_path / "x") as file:
        rest = memoryview(b"0123456789" * 3)
        while rest:
            rest = rest[file.write(rest) :]
    assert (tmp_path / "x").read_bytes() == b"0123456789" * 3
    assert len(synced) == 3


def test_one_survivor_waits_for_another_and_not_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survivors, "_SECONDS", 0.1)
    with (
        FileLock(tmp_path / "lock"),
        pytest.raises(CheckpointError, match="another rank"),
        _one_at_a_time(tmp_path / "lock"),
    ):
        pytest.fail("it does not hold the lock")
    with _one_at_a_time(tmp_path / "lock"):
        pass


def test_a_directory_that_another_run_uses_by_now_is_recognised(tmp_path: Path) -> None:
    first = RunDir(tmp_path / "run")
    before = holder_of(first.path)
    assert before is not None
    first.close()
    assert holder_of(first.path) == before, "until somebody else begins there"
    (first.path / "run.lock").write_text("process 1 on another machine\n")
    assert holder_of(first.path) != before
    assert holder_of(tmp_path / "gone") is None
