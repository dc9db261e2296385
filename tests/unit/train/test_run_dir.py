"""A run's directory: one run at a time in it, and what an earlier one left is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.checkpoint.files import Files
from samestep.checkpoint.format import (
    MANIFEST,
    MODEL,
    TRAINING,
    Manifest,
    folder_name,
    write_checkpoint,
)
from samestep.config import Config, load_config
from samestep.distributed.context import SingleProcessContext
from samestep.errors import CheckpointError, RunDirError
from samestep.train.open_run import Opened, open_run
from samestep.train.run_dir import RunDir

# -- the lock -------------------------------------------------------------------------------------

HOLDER = """
import os, sys, time
from pathlib import Path
from samestep.train.run_dir import RunDir

folder = RunDir(Path(sys.argv[1]))
worker = os.fork() if "worker" in sys.argv else 1  # as a DataLoader starts its own
if worker == 0:
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
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), *how], stdout=subprocess.PIPE, text=True
    )
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


def test_a_directory_in_use_by_another_process_is_refused_with_its_name(tmp_path: Path) -> None:
    with holder(tmp_path / "run") as process:
        with pytest.raises(RunDirError) as caught:
            RunDir(tmp_path / "run")
        text = str(caught.value)
        assert f"run directory {tmp_path / 'run'} is in use by process {process.pid} on " in text
        assert "Wait for that run to end, or set another name or run_dir" in text


def test_a_killed_process_lets_go_of_its_directory(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.kill()
        process.wait()
        folder = RunDir(tmp_path)
        assert f"process {os.getpid()} on" in (tmp_path / "run.lock").read_text()
        folder.close()


def test_a_killed_process_lets_go_though_its_workers_are_still_ending(tmp_path: Path) -> None:
    with holder(tmp_path, "worker") as process:
        process.kill()
        process.wait()
        # The worker lets go as its first act, which on a busy machine may take a moment.
        deadline = time.monotonic() + 120
        while True:
            try:
                RunDir(tmp_path).close()
                break
            except RunDirError:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_a_closed_directory_is_free_though_workers_are_still_ending(tmp_path: Path) -> None:
    with holder(tmp_path, "worker", "close"):
        RunDir(tmp_path).close()


def test_two_runs_of_one_process_do_not_share_a_directory(tmp_path: Path) -> None:
    first = RunDir(tmp_path)
    with pytest.raises(RunDirError, match=f"in use by process {os.getpid()} on"):
        RunDir(tmp_path)
    first.close()
    first.close()  # twice is no matter
    RunDir(tmp_path).close()
    assert len((tmp_path / "run.lock").read_text().splitlines()) == 1


def test_a_refused_run_does_not_take_the_holders_name_away(tmp_path: Path) -> None:
    first = RunDir(tmp_path)
    for _ in range(2):
        with pytest.raises(RunDirError, match=f"process {os.getpid()}"):
            RunDir(tmp_path)
    first.close()


@pytest.mark.parametrize("in_the_way", ["run", "run/run.lock", ""])
def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path, in_the_way: str) -> None:
    blocked = tmp_path / "runs"
    path = blocked / in_the_way
    if in_the_way == "run/run.lock":
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a file")
    with pytest.raises(RunDirError) as caught:
        RunDir(blocked / "run")
    assert f"run directory {blocked / 'run'} cannot be written: " in str(caught.value)
    assert "Set run_dir to a directory that you can write to" in str(caught.value)


# -- what an earlier run left ---------------------------------------------------------------------


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
    assert {path.name for path in folder.path.iterdir()} == {
        "earlier", "verify", "launch", "run.lock"
    }  # fmt: skip


def test_a_number_that_is_taken_is_passed_over(folder: RunDir) -> None:
    for name in ("1", "2", "4"):
        (folder.path / "earlier" / name).mkdir(parents=True)
    fill(folder.path, "mine")
    assert folder.set_aside() == folder.path / "earlier" / "3"


def test_where_no_run_was_nothing_is_set_aside(folder: RunDir) -> None:
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
def test_rows_after_the_checkpoint_are_forgotten(
    folder: RunDir, before: str, step: int, after: str
) -> None:
    path = folder.path / "metrics.jsonl"
    path.write_text(before)
    folder.forget_after(step)
    assert path.read_text() == after
    assert sorted(p.name for p in folder.path.iterdir()) == ["metrics.jsonl", "run.lock"]


def test_a_row_that_lost_only_its_line_end_does_not_spoil_the_next(folder: RunDir) -> None:
    path = folder.path / "metrics.jsonl"
    path.write_text(rows(0, 1).removesuffix("\n"))
    folder.forget_after(2)
    with path.open("a") as file:
        file.write(rows(2))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] in (
        [0, 1, 2],
        [0, 2],
    )


def test_without_metrics_there_is_nothing_to_forget(folder: RunDir) -> None:
    folder.forget_after(4)
    assert [path.name for path in folder.path.iterdir()] == ["run.lock"]


# -- opening a run --------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"task": "task.py:Good", "epochs": 3, "global_batch": 8}


def put(config: Config, *steps: int) -> None:
    """Checkpoints of a run in its directory, and its metrics up to the last of them."""
    path = config.run_path
    path.mkdir(parents=True, exist_ok=True)
    for step in steps:
        said = Manifest(
            step=step,
            epoch=0,
            world=1,
            saved_at=0.0,
            metrics={},
            best=None,
            ended=None,
            config=config.model_dump(mode="json"),
            plan={"global_batch": 8, "lanes": 8},
            versions={},
        )
        folder = path / "checkpoints" / folder_name(step)
        write_checkpoint(Files(), folder, {"w": torch.ones(1)}, {"step": step}, said)
    (path / "metrics.jsonl").write_text(rows(*range(max(steps) + 2)))


@contextmanager
def opened(config: Config) -> Iterator[Opened]:
    with SingleProcessContext() as context:
        found = open_run(config, context, config.batch_plan(1))
        try:
            yield found
        finally:
            assert found.folder is not None
            found.folder.close()


def config_in(tmp_path: Path, *overrides: str) -> Config:
    return load_config({**GOOD, "run_dir": str(tmp_path / "run")}, overrides)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_new_run_finds_an_empty_directory(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with opened(config) as found:
        assert found.point is None
        assert json.loads((config.run_path / "config.json").read_text())["epochs"] == 3


def test_a_run_that_goes_on_keeps_its_metrics_up_to_the_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_in(tmp_path)
    put(config, 2, 4)
    with opened(config) as found:
        assert found.point is not None
        assert found.point.folder == config.run_path / "checkpoints" / folder_name(4)
    assert steps_in(config.run_path) == [0, 1, 2, 3]
    assert not (config.run_path / "earlier").exists()
    assert f"Resuming from {found.point.folder}: step 4, epoch 0" in capfd.readouterr().err


def test_a_run_that_begins_anew_sets_the_earlier_one_aside(tmp_path: Path) -> None:
    config = config_in(tmp_path, "resume=never", "seed=1")
    put(config_in(tmp_path), 2, 4)
    with opened(config) as found:
        assert found.point is None
    assert not (config.run_path / "checkpoints").exists()
    assert steps_in(config.run_path / "earlier" / "1") == [0, 1, 2, 3, 4, 5]


def test_a_branch_from_an_older_checkpoint_sets_the_rest_aside(tmp_path: Path) -> None:
    put(config_in(tmp_path), 2, 4)
    older = tmp_path / "run" / "checkpoints" / folder_name(2)
    with opened(config_in(tmp_path, f"resume.checkpoint={older}")) as found:
        assert found.point is not None
        assert found.point.folder == older, "it has come along, for a restart before the next save"
        assert (older / TRAINING).exists()
        assert not (older.parent / folder_name(4)).exists()
        aside = tmp_path / "run" / "earlier" / "1" / "checkpoints"
        assert sorted(path.name for path in aside.iterdir()) == [folder_name(2), folder_name(4)]


def test_another_run_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    config = config_in(tmp_path, "seed=1")
    put(config_in(tmp_path), 2, 4)
    before = (config.run_path / "metrics.jsonl").read_text()
    with pytest.raises(CheckpointError, match="seed was 0, is 1"), opened(config):
        pytest.fail("it is another run")
    assert (config.run_path / "metrics.jsonl").read_text() == before
    assert not (config.run_path / "config.json").exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (Path.unlink, MANIFEST),
        (cut, MODEL),
        (cut, TRAINING),
        pytest.param(
            flip,
            MODEL,
        ),
    ],
)
def test_a_damaged_newest_checkpoint_does_not_make_the_run_a_branch(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    name: str,
) -> None:
    config = config_in(tmp_path)
    put(config, 2, 4)
    newest = config.run_path / "checkpoints" / folder_name(4)
    damage(newest / name)
    with opened(config) as found:
        assert found.point is not None
        assert found.point.manifest.step == 2
        assert f"checkpoint {newest} is not used" in capfd.readouterr().err
    assert not (config.run_path / "earlier").exists()
    assert steps_in(config.run_path) == [0, 1]
    # Killed before its first save, it goes on from there once more, and not from the beginning.
    with opened(config) as found:
        assert found.point is not None
        assert found.point.manifest.step == 2


@pytest.mark.parametrize("content", ["", '"4f', "{}"])
def test_a_cut_note_of_the_launch_does_not_keep_a_run_from_starting(
    folder: RunDir, content: str
) -> None:
    (folder.path / "started.json").write_text(content)
    assert folder.started_by() == []
