"""A run's directory when a run is opened: fresh, resumed, set aside, or branched off."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import samestep
from samestep.checkpoint.format import read_model
from samestep.config import load_config
from samestep.distributed.context import SingleProcessContext
from samestep.errors import CheckpointError, RunDirError, Stopped
from samestep.run_setup import RunSetup
from samestep.train.open_run import Opened, open_run
from tests.unit.train.own_loops import (
    assert_equal,
    losses,
    prepared,
    settings,
    train,
    train_part,
)


def opened(context: SingleProcessContext, config: dict[str, Any]) -> Opened:
    return open_run(RunSetup.create(load_config(config), context))


def half(folder: Path, steps: int = 4) -> None:
    """A run that is stopped after so many of its six steps."""
    with pytest.raises(Stopped):
        train_part(settings(folder), steps)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_new_run_starts_from_the_beginning_and_holds_its_directory(
    context: SingleProcessContext, tmp_path: Path
) -> None:
    found = opened(context, settings(tmp_path))
    assert found.point is None
    assert json.loads((tmp_path / "config.json").read_text())["global_batch"] == 8
    assert (tmp_path / "logs" / "rank-0.log").exists()
    with pytest.raises(RunDirError, match="is in use"):
        opened(context, settings(tmp_path))
    found.close()
    found.close()
    opened(context, settings(tmp_path)).close()


def test_the_task_is_stored_so_that_it_is_found_from_anywhere(
    context: SingleProcessContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    opened(context, settings(tmp_path / "run", task="task.py:Small")).close()
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["task"]
    assert stored == f"{tmp_path.resolve()}/task.py:Small"


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    half(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1.0}\n{"step": 5, "lo')  # it was ended while it wrote
    with samestep.start(settings(tmp_path)) as run:
        assert run.start_step == 4
        assert len(losses(tmp_path)) == 4


def test_a_resume_is_reported_with_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    half(tmp_path)
    capsys.readouterr()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    with samestep.start(settings(tmp_path)):
        pass
    text = capsys.readouterr().err
    assert f"Resuming from {tmp_path}/checkpoints/step-00000004: step 4, epoch 1, written" in text
    assert "at world size 1; now 1 (Slurm restart 2)" in text


def test_never_sets_the_earlier_run_aside(tmp_path: Path) -> None:
    half(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with samestep.start(settings(tmp_path, resume={"checkpoint": "never"})) as run:
        assert run.start_step == 0
    aside = tmp_path / "earlier" / "1"
    assert {"checkpoints", "metrics.jsonl", "config.json"} <= names(aside)
    assert "notes.txt" in names(tmp_path), "other files are not ours to move"


def test_another_run_is_refused_before_anything_is_moved(tmp_path: Path) -> None:
    half(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(CheckpointError, match="seed was 3, is 4"):
        samestep.start(settings(tmp_path, seed=4))
    assert (tmp_path / "metrics.jsonl").read_text() == before
    with samestep.start(settings(tmp_path)) as run:
        assert run.start_step == 4


def test_a_branch_starts_from_another_runs_checkpoint_and_leaves_that_alone(
    tmp_path: Path,
) -> None:
    half(tmp_path / "first")
    before = names(tmp_path / "first" / "checkpoints")
    branch = settings(tmp_path / "second", resume={"checkpoint": str(tmp_path / "first")})
    with samestep.start(branch) as run:
        assert run.start_step == 4
        found = train(run)
    with samestep.start(settings(tmp_path / "first")) as run:
        assert_equal(found, train(run))
    assert "step-00000004" in before
    assert "step-00000004" in names(tmp_path / "second" / "checkpoints")


def test_a_branch_that_was_ended_at_once_resumes_without_its_origin(tmp_path: Path) -> None:
    half(tmp_path / "first")
    branch = settings(tmp_path / "second", resume={"checkpoint": str(tmp_path / "first")})
    with samestep.start(branch):
        pass  # it has saved nothing itself
    shutil.rmtree(tmp_path / "first")
    with samestep.start(settings(tmp_path / "second")) as run:
        assert run.start_step == 4


def test_a_run_may_branch_off_from_its_own_earlier_checkpoint(tmp_path: Path) -> None:
    half(tmp_path, steps=5)
    own = tmp_path / "checkpoints" / "step-00000003"
    with samestep.start(settings(tmp_path, resume={"checkpoint": str(own)})) as run:
        assert run.start_step == 3
    assert names(tmp_path / "checkpoints") == {"step-00000003"}
    assert "step-00000005" in names(tmp_path / "earlier" / "1" / "checkpoints")


def test_a_branch_on_another_file_system_copies_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: str, target: str) -> None:
        raise OSError(18, "Invalid cross-device link")

    half(tmp_path / "first")
    monkeypatch.setattr(os, "link", fail)
    branch = settings(tmp_path / "second", resume={"checkpoint": str(tmp_path / "first")})
    with samestep.start(branch) as run:
        assert run.start_step == 4


def test_an_error_while_opening_releases_the_directory(tmp_path: Path) -> None:
    missing = settings(tmp_path, resume={"checkpoint": str(tmp_path / "nowhere")})
    for _ in range(2):  # the second time, the directory is not in use
        with pytest.raises(CheckpointError, match="is not a valid checkpoint"):
            samestep.start(missing)


def test_other_ranks_resume_where_rank_0_does(tmp_path: Path) -> None:
    half(tmp_path)
    with SingleProcessContext() as main:
        point = opened(main, settings(tmp_path))
        point.close()

    class Other(SingleProcessContext):
        @property
        def is_main(self) -> bool:
            return False

        def broadcast(self, value: Any, source: int = 0) -> Any:
            assert value is None
            return point.point

    with Other() as context:
        found = opened(context, settings(tmp_path))
        assert found.run_dir is None
        assert found.point == point.point
        found.close()


def test_weights_of_a_branch_are_those_of_its_checkpoint(tmp_path: Path) -> None:
    half(tmp_path / "first", steps=3)
    branch = settings(tmp_path / "second", resume={"checkpoint": str(tmp_path / "first")})
    with samestep.start(branch) as run:
        branched = dict(prepared(run)[0].state_dict())
    assert_equal(branched, read_model(tmp_path / "first" / "checkpoints" / "step-00000003"))
