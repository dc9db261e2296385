"""Opening a run: where it resumes from, and what is set aside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint.manifest import TRAINING, folder_name
from samestep.checkpoint.ownership import claim
from samestep.config import Config, load_config
from samestep.distributed.context import SingleProcessContext
from samestep.errors import CheckpointError, RunDirError
from samestep.run.open_run import Opened, open_run
from samestep.run_setup import RunSetup
from tests.unit.checkpoint.checkpoints import DAMAGED, manifest
from tests.unit.checkpoint.checkpoints import put as put_checkpoint


def rows(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "loss": step / 3}) + "\n" for step in steps)


GOOD: dict[str, Any] = {"task": "task.py:Good", "epochs": 3, "global_batch": 8}


def put(config: Config, *steps: int) -> None:
    """Checkpoints of a run in its directory, and its metrics up to the last of them."""
    path = claim(config.run_path)
    for step in steps:
        saved = manifest(step, config=config.model_dump(mode="json"), plan={"global_batch": 8, "lanes": 8})
        put_checkpoint(path / "checkpoints", saved=saved)
    (path / "metrics.jsonl").write_text(rows(*range(max(steps) + 2)))


@contextmanager
def opened(config: Config) -> Iterator[Opened]:
    with SingleProcessContext() as context:
        found = open_run(RunSetup.create(config, context))
        try:
            yield found
        finally:
            found.close()


def config_in(tmp_path: Path, *overrides: str) -> Config:
    return load_config({**GOOD, "run_dir": str(tmp_path / "run")}, overrides)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_new_run_finds_an_empty_directory(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with opened(config) as found:
        assert found.point is None
        assert not (config.run_path / "config.json").exists(), "it may still be refused"
        found.accept()
        assert json.loads((config.run_path / "config.json").read_text())["epochs"] == 3


def test_a_resumed_run_keeps_its_metrics_up_to_the_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_in(tmp_path)
    put(config, 2, 4)
    with opened(config) as found:
        assert found.point is not None
        assert found.point.folder == config.run_path / "checkpoints" / folder_name(4)
    assert steps_in(config.run_path) == [0, 1, 2, 3]
    assert not (config.run_path / "earlier").exists()
    assert f"Resuming from {found.point.folder}: step 4, epoch 1" in capfd.readouterr().err


def test_a_branch_from_an_older_checkpoint_sets_the_rest_aside(tmp_path: Path) -> None:
    put(config_in(tmp_path), 2, 4)
    older = tmp_path / "run" / "checkpoints" / folder_name(2)
    with opened(config_in(tmp_path, f"resume.checkpoint={older}")) as found:
        assert found.point is not None
        assert found.point.shown == older
        assert (found.point.folder / TRAINING).exists(), "a copy, for a restart before the next save"
        found.accept()
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


@DAMAGED
def test_a_damaged_newest_checkpoint_does_not_make_the_run_a_branch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: Callable[[Path], None], words: str
) -> None:
    config = config_in(tmp_path)
    put(config, 2, 4)
    newest = config.run_path / "checkpoints" / folder_name(4)
    damage(newest)
    with opened(config) as found:
        assert found.point is not None
        assert found.point.manifest.step == 2
        assert f"checkpoint {newest} is not used" in capfd.readouterr().err
    assert not (config.run_path / "earlier").exists()
    assert steps_in(config.run_path) == [0, 1]
    # Killed before its first save, it resumes from there again, and not from the beginning.
    with opened(config) as found:
        assert found.point is not None
        assert found.point.manifest.step == 2


def branch_in(tmp_path: Path, *overrides: str) -> Config:
    """Another run that starts from the newest checkpoint of the one in `run`."""
    overrides = ("run_dir=" + str(tmp_path / "branch"), f"resume={tmp_path / 'run'}", *overrides)
    return config_in(tmp_path, *overrides)


def test_a_branch_that_is_refused_later_leaves_no_copy_of_the_checkpoint(tmp_path: Path) -> None:
    put(config_in(tmp_path), 2, 4)
    with opened(branch_in(tmp_path)) as found:
        assert found.point is not None
        assert found.point.folder.is_dir()
    assert not (tmp_path / "branch" / "checkpoints").exists()
    with opened(config_in(tmp_path, "run_dir=" + str(tmp_path / "branch"))) as found:
        assert found.point is None, "nothing of the other run is resumed by accident"


def test_a_start_that_is_refused_leaves_the_earlier_run_as_it_was(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    put(config, 2, 4)
    with opened(config) as found:
        found.accept()
    before = (config.run_path / "config.json").read_text()
    for refused in ("resume=never", f"resume={config.run_path}/checkpoints/{folder_name(2)}"):
        with opened(config_in(tmp_path, refused, "log_every=7")):
            assert not (config.run_path / "checkpoints" / folder_name(4)).exists()
        assert (config.run_path / "checkpoints" / folder_name(4)).is_dir()
        assert (config.run_path / "config.json").read_text() == before
    with opened(config) as found:
        assert found.point is not None
        assert found.point.manifest.step == 4


def test_a_branch_resumes_from_its_own_copy_when_its_origin_is_gone(tmp_path: Path) -> None:
    put(config_in(tmp_path), 2, 4)
    with opened(branch_in(tmp_path)) as found:
        found.accept()
    shutil.rmtree(tmp_path / "run")
    with opened(branch_in(tmp_path)) as found:
        assert found.point is not None
        assert found.point.folder == tmp_path / "branch" / "checkpoints" / folder_name(4)
        assert not found.point.branches


def test_a_directory_that_is_removed_meanwhile_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path)

    def removed(*_: object, **__: object) -> None:
        shutil.rmtree(config.run_path)

    with opened(config) as found:
        removed()
        with pytest.raises(RunDirError, match="cannot be written: No such file"):
            found.accept()
    monkeypatch.setattr("samestep.run.open_run.find_resume_point", removed)
    with pytest.raises(RunDirError, match="cannot be written: No such file"), opened(config):
        pytest.fail("there is no directory")
