"""Locks with heartbeats: who holds a directory, also on another machine, and who may take it over."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from samestep.checkpoint import directory_lock
from samestep.checkpoint.directory_lock import SECONDS_TO_LIVE, DirectoryLock, holder_of
from samestep.errors import RunDirError

ELSEWHERE = "process 1 on elsewhere since 2026-01-01 00:00:00\nabc\n"


def lock(folder: Path) -> DirectoryLock:
    return DirectoryLock(folder, "x.lock", "it", "Wait", beats=True)


def left_behind(folder: Path, text: str, age: float) -> None:
    """A lock's file whose process has not released it."""
    path = folder / "x.lock"
    path.write_text(text)
    then = time.time() - age
    os.utime(path, (then, then))


def test_a_lock_names_its_process_until_it_is_released(tmp_path: Path) -> None:
    held = lock(tmp_path)
    assert held.taken_from is None
    found = holder_of(tmp_path / "x.lock")
    assert found is not None
    assert found.text.startswith(f"process {os.getpid()} on {socket.gethostname()} since")
    assert found.is_alive
    assert found.is_here
    assert found.age < SECONDS_TO_LIVE
    with pytest.raises(RunDirError, match=f"in use by process {os.getpid()}"):
        lock(tmp_path)
    held.release()
    held.release()
    assert holder_of(tmp_path / "x.lock") is None
    lock(tmp_path).release()


def test_a_process_elsewhere_is_refused_while_its_heartbeat_is_fresh(tmp_path: Path) -> None:
    left_behind(tmp_path, ELSEWHERE, 20)
    with pytest.raises(RunDirError) as error:
        lock(tmp_path)
    assert "process 1 on elsewhere since 2026-01-01 00:00:00, whose last heartbeat was 2" in str(error.value)
    assert "it can be taken over" in str(error.value)
    left_behind(tmp_path, ELSEWHERE, SECONDS_TO_LIVE + 20)
    held = lock(tmp_path)
    assert held.taken_from is not None
    assert not held.taken_from.is_alive
    assert "process 1 on elsewhere" in held.taken_from.words()
    held.release()


def test_a_killed_process_of_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    # Its number may be another's by now: the kernel has released its lock.
    text = f"process {os.getpid()} on {socket.gethostname()} since 2026-01-01 00:00:00\n"
    left_behind(tmp_path, text, 1)
    held = lock(tmp_path)
    assert held.taken_from is not None
    held.release()


def test_without_locks_of_the_file_system_heartbeats_count_here_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*arguments: object, **options: object) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(directory_lock.FileLock, "acquire", no_locks)
    held = lock(tmp_path)
    with pytest.raises(RunDirError, match=f"in use by process {os.getpid()}"):
        lock(tmp_path)
    held.release()
    lock(tmp_path).release()


def test_a_heart_beats_until_another_process_has_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_lock, "SECONDS_BETWEEN_BEATS", 0.01)
    path = tmp_path / "x.lock"
    held = lock(tmp_path)
    os.utime(path, (1.0, 1.0))
    deadline = time.monotonic() + 60
    while path.stat().st_mtime < 2.0:
        assert time.monotonic() < deadline, "it beats"
        threading.Event().wait(0.01)
    held.refuse_lost()
    left_behind(tmp_path, ELSEWHERE, 0)
    with pytest.raises(RunDirError, match="was taken over by process 1 on elsewhere"):
        held.refuse_lost()
    held.release()
    assert path.read_text() == ELSEWHERE, "it is the other one's"
