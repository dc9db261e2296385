"""A run's directory: one run at a time, and the files of an earlier one are kept."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from samestep.checkpoint.ownership import claim
from samestep.errors import RunDirError
from samestep.run.run_dir import RunDir

FRESH = [".samestep-run", "run.lock"]
"""What is in a directory that a run has just opened."""
HOLDER = """
import os, sys, time
from pathlib import Path
from samestep.run.run_dir import RunDir

folder = RunDir(Path(sys.argv[1]))
worker = os.fork() if {"worker", "worker-closes"} & set(sys.argv) else 1  # as a DataLoader does
if worker == 0:
    if "worker-closes" in sys.argv:
        folder.close()
    time.sleep(600)
    os._exit(0)
if "close" in sys.argv:
    folder.close()
print(worker, flush=True)
time.sleep(600)
"""


@contextmanager
def holder(folder: Path, *how: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the directory, and perhaps has a worker."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder), *how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if worker > 1:
            os.kill(worker, signal.SIGKILL)


@pytest.mark.requirement("000-P4-3")
def test_a_directory_in_use_by_another_process_is_refused_with_its_name(tmp_path: Path) -> None:
    with holder(tmp_path / "run") as process:
        with pytest.raises(RunDirError) as caught:
            RunDir(tmp_path / "run")
        text = str(caught.value)
        assert f"run directory {tmp_path / 'run'} is in use by process {process.pid} on " in text
        assert "Wait for that run to end, or set another name or run_dir" in text


def test_a_killed_process_releases_its_directory(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.kill()
        process.wait()
        folder = RunDir(tmp_path)
        assert f"process {os.getpid()} on" in (tmp_path / "run.lock").read_text()
        folder.close()


def test_a_killed_process_releases_its_directory_though_its_workers_still_run(tmp_path: Path) -> None:
    with holder(tmp_path, "worker") as process:
        process.kill()
        process.wait()
        # The worker closes the lock first of all, which on a busy machine may take a moment.
        deadline = time.monotonic() + 120
        while True:
            try:
                RunDir(tmp_path).close()
                break
            except RunDirError:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_a_closed_directory_is_free_though_workers_still_run(tmp_path: Path) -> None:
    with holder(tmp_path, "worker", "close"):
        RunDir(tmp_path).close()


def test_a_worker_that_closes_its_copy_does_not_release_the_directory(tmp_path: Path) -> None:
    with (
        holder(tmp_path, "worker-closes") as process,
        pytest.raises(RunDirError, match=f"in use by process {process.pid} on"),
    ):
        RunDir(tmp_path)


def test_a_directory_locked_by_one_thread_can_be_released_by_another(tmp_path: Path) -> None:
    first = RunDir(tmp_path)
    closing = threading.Thread(target=first.close)
    closing.start()
    closing.join()
    RunDir(tmp_path).close()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = RunDir(tmp_path), RunDir(tmp_path)
    for folder in (first, second, first):
        folder.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == FRESH


def test_two_runs_of_one_process_do_not_share_a_directory(tmp_path: Path) -> None:
    first = RunDir(tmp_path)
    for _ in range(2):  # a refused run leaves the holder's name
        with pytest.raises(RunDirError, match=f"in use by process {os.getpid()} on"):
            RunDir(tmp_path)
    first.close()
    first.close()  # twice is safe
    RunDir(tmp_path).close()
    assert len((tmp_path / "run.lock").read_text().splitlines()) == 1


IN_THE_WAY: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file": (lambda run: run.write_text("mine"), "is a file, not a directory"),
    "a dangling link": (
        lambda run: run.symlink_to(run.parent / "gone"),
        "it is a link to .*gone, which does not exist",
    ),
    "a link to a file": (lambda run: run.symlink_to(__file__), "is a file, not a directory"),
    "a file above": (lambda run: (run.parent.rmdir(), run.parent.write_text("mine")), ""),
    "a directory for the lock": (lambda run: claim(run, "run.lock"), ""),
}


@pytest.mark.parametrize("kind", IN_THE_WAY)
def test_a_directory_that_cannot_be_written_is_one_clear_error(tmp_path: Path, kind: str) -> None:
    put, words = IN_THE_WAY[kind]
    run = tmp_path / "runs" / "run"
    run.parent.mkdir()
    put(run)
    with pytest.raises(RunDirError, match=f"run directory {run} cannot be written: .*{words}") as caught:
        RunDir(run)
    assert "Set run_dir to a directory that you can write to" in str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunDir]:
    found = RunDir(tmp_path / "run")
    yield found
    found.close()


def fill(path: Path, mark: str) -> None:
    for name in ("metrics.jsonl", "config.json", "model.safetensors", "plan.json"):
        (path / name).write_text(mark)
    for name in ("checkpoints/step-00000002", "logs", "launch", "verify", "tensorboard", "export"):
        (path / name).mkdir(parents=True, exist_ok=True)
        (path / name / "file").write_text(mark)


def test_what_an_earlier_run_left_is_set_aside_under_a_number(folder: RunDir) -> None:
    fill(folder.path, "first")
    assert folder.set_aside() == folder.path / "earlier" / "1"
    fill(folder.path, "second")
    assert folder.set_aside() == folder.path / "earlier" / "2"
    for number, mark in (("1", "first"), ("2", "second")):
        aside = folder.path / "earlier" / number
        assert {path.name for path in aside.iterdir()} == {
            "metrics.jsonl", "config.json", "model.safetensors", "plan.json", "checkpoints", "logs",
            "tensorboard", "export",
        }  # fmt: skip
        assert (aside / "metrics.jsonl").read_text() == mark
        assert (aside / "checkpoints" / "step-00000002" / "file").read_text() == mark
    assert {path.name for path in folder.path.iterdir()} == {"earlier", "verify", "launch", *FRESH}


def test_a_number_that_is_taken_is_skipped(folder: RunDir) -> None:
    for name in ("1", "2", "4"):
        (folder.path / "earlier" / name).mkdir(parents=True)
    fill(folder.path, "mine")
    assert folder.set_aside() == folder.path / "earlier" / "3"


def test_without_an_earlier_run_nothing_is_set_aside(folder: RunDir) -> None:
    assert folder.set_aside() is None
    (folder.path / "launch").mkdir()
    assert folder.set_aside() is None
    assert not (folder.path / "earlier").exists()


def test_checkpoints_without_metrics_are_set_aside_too(folder: RunDir) -> None:
    """As after a set_aside that was killed half way, or a metrics.jsonl that was moved away."""
    fill(folder.path, "first")
    (folder.path / "metrics.jsonl").unlink()
    folder.set_aside()
    assert not (folder.path / "checkpoints").exists()


def rows(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "loss": step / 3}) + "\n" for step in steps)


@pytest.mark.parametrize(
    ("before", "step", "after"),
    [
        (rows(0, 1, 2, 3, 4, 5), 4, rows(0, 1, 2, 3)),
        (rows(0, 1, 2), 3, rows(0, 1, 2)),
        (rows(0, 1, 2), 0, ""),
        (rows(0, 1) + '{"step": 2, "lo', 4, rows(0, 1)),
        (rows(0, 1) + '{"step": 1, "los' + rows(1), 4, rows(0, 1)),
        (rows(0) + '{"step": 2}\n' * 2 + rows(1, 3), 3, rows(0) + '{"step": 2}\n' * 2 + rows(1)),
        (rows(0, 1) + "null\n[]\n{}\n\n\0\0\0\n", 4, rows(0, 1)),
        (rows(0) + '{"step": "x"}\n{"step": null}\n', 4, rows(0)),
        ("", 4, ""),
    ],
)
def test_rows_after_the_checkpoint_are_removed(folder: RunDir, before: str, step: int, after: str) -> None:
    path = folder.path / "metrics.jsonl"
    path.write_text(before)
    folder.forget_after(step)
    assert path.read_text() == after
    assert sorted(p.name for p in folder.path.iterdir()) == sorted(["metrics.jsonl", *FRESH])


def test_a_row_without_its_line_end_does_not_damage_the_next(folder: RunDir) -> None:
    path = folder.path / "metrics.jsonl"
    path.write_text(rows(0, 1).removesuffix("\n"))
    folder.forget_after(2)
    with path.open("a") as file:
        file.write(rows(2))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] in ([0, 1, 2], [0, 2])


def test_without_metrics_there_is_nothing_to_remove(folder: RunDir) -> None:
    folder.forget_after(4)
    assert sorted(path.name for path in folder.path.iterdir()) == FRESH


@pytest.mark.parametrize("content", ["", '"4f', "{}"])
def test_a_truncated_launch_file_does_not_prevent_a_run_from_starting(folder: RunDir, content: str) -> None:
    (folder.path / "started.json").write_text(content)
    assert folder.started_by() == []
