"""Directories: a user's files are never overwritten or removed."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from samestep.bench.tuning.lr_range_test import find_lr
from samestep.bench.tuning.lr_suggestion import RangeTest
from samestep.checkpoint.ownership import claim, claim_empty, clear, marker_of
from samestep.checkpoint.torch_file import write_torch_file
from samestep.cli import app
from samestep.cli.starter import write_starter
from samestep.config import load_config
from samestep.errors import ConfigError, LaunchError, OutputError, RunDirError
from samestep.launch.run.slurm import write_private
from samestep.run.run_dir import RunDir
from samestep.train.record import Recorder
from samestep.verify.verify import _fresh_folder
from tests.predicting import finished_run
from tests.unit.contexts import TwoRanks

GOOD = {"task": "task.py:Good", "epochs": 1, "global_batch": 8}


def theirs(folder: Path) -> dict[str, str]:
    """What a user has in a directory of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "metrics.jsonl", "notes.txt"):
        (folder / name).write_text(f"my own {name}")
    return content(folder)


def content(folder: Path) -> dict[str, str]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in found}


def test_a_directory_is_ours_once_its_marker_is_there(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    assert claim(run, "launch") == run / "launch"
    assert marker_of(run).is_file()
    (run / "whatever").write_text("")
    assert claim(run) == run


def test_a_directory_with_other_files_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    before = theirs(tmp_path)
    for refused in (lambda: claim(tmp_path), lambda: RunDir(tmp_path)):
        with pytest.raises(RunDirError, match=r"holds files \(config.json, .*\) and is not a run's"):
            refused()
    assert content(tmp_path) == before


def test_a_directory_for_something_else_is_not_a_runs(tmp_path: Path) -> None:
    claim(tmp_path, purpose="verify")
    with pytest.raises(RunDirError, match="is not a run's directory"):
        claim(tmp_path)


def test_clearing_removes_only_what_carries_the_marker(tmp_path: Path) -> None:
    before = theirs(tmp_path)
    with pytest.raises(RunDirError, match="is not a directory of samestep verify"):
        clear(tmp_path, "verify")
    assert content(tmp_path) == before
    ours, elsewhere = claim(tmp_path / "ours", "world-1", purpose="verify").parent, tmp_path / "x"
    kept = theirs(elsewhere)
    (ours / "link").symlink_to(elsewhere)
    clear(ours, "verify")
    assert list(ours.iterdir()) == [marker_of(ours, "verify")]
    assert content(elsewhere) == kept, "a link is removed, not what it leads to"
    clear(tmp_path / "nowhere", "verify")


def test_a_directory_of_runs_is_not_cleared_as_a_verification(tmp_path: Path) -> None:
    claim(tmp_path / "verify", "checkpoints")
    with pytest.raises(RunDirError):
        clear(tmp_path / "verify", "verify")
    assert (tmp_path / "verify" / "checkpoints").is_dir()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_refuses_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code), str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RunDirError, match=os.strerror(code)) as caught:
        RunDir(tmp_path / "run")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../up", "a/b", "a\\b", "-rf", "~", "~root", ".hidden", "a\nb", "a\x9bb", "x" * 101]
)
def test_a_name_is_one_plain_path_component(name: str) -> None:
    with pytest.raises(ConfigError, match="a plain folder name of at most 100 characters"):
        load_config({**GOOD, "name": name})


@pytest.mark.parametrize("run_dir", ["", "a\nb"])
def test_an_empty_run_dir_is_refused(run_dir: str) -> None:
    with pytest.raises(ConfigError, match=r"run_dir.*it takes text \(one line, not empty\)"):
        load_config({**GOOD, "run_dir": run_dir})


@pytest.mark.parametrize("name", ["tiny", "a.b-c~d", "Übung 7", "漢字"])
def test_names_that_are_plain(name: str) -> None:
    assert load_config({**GOOD, "name": name}).run_path == Path("runs") / name


def test_verify_and_lr_find_leave_a_users_directory_alone(tmp_path: Path, two_ranks: TwoRanks) -> None:
    before = theirs(tmp_path) | {f"verify/{n}": t for n, t in theirs(tmp_path / "verify").items()}
    config = load_config({**GOOD, "run_dir": str(tmp_path)})
    with pytest.raises(RunDirError, match="is not a run's directory"):
        _fresh_folder(config)
    with pytest.raises(RunDirError, match="is not a run's directory"):
        find_lr(config, two_ranks, RangeTest())
    assert content(tmp_path) == before


def test_verify_replaces_its_own_directory_only(tmp_path: Path) -> None:
    config = load_config({**GOOD, "run_dir": str(tmp_path / "run")})
    folder = _fresh_folder(config)
    (folder / "world-1").mkdir()
    assert _fresh_folder(config) == folder
    assert not (folder / "world-1").exists()
    marker_of(folder, "verify").unlink()
    (folder / "mine").write_text("")
    with pytest.raises(RunDirError, match="is not a directory of samestep verify"):
        _fresh_folder(config)
    assert (folder / "mine").exists()
    RunDir(config.run_path).close()  # a run there comes after a verification


def test_a_private_file_is_nobody_elses(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text("before")
    path.chmod(0o644)
    write_private(path, "after", 0o600)
    assert path.read_text() == "after"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_private(path, "again", 0o700, new=True)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write_private(link, "again", 0o700, new=True)
    assert json.dumps(sorted(p.name for p in tmp_path.iterdir())) == '["job.sh", "link"]'


def test_no_command_replaces_a_file_that_a_user_has_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = finished_run(Path("run"))
    mine = Path("mine.pt")
    mine.write_text("mine")
    Path("mine.onnx.json").write_text("mine")
    for words in (
        ["export", "run", "--to", "pt", "--output", "mine.pt", "--which", "last"],
        ["export", "run", "--to", "safetensors", "--output", "mine.pt"],
        ["export", "run", "--to", "safetensors", "--output", "mine.onnx"],
        ["predict", "run", "valid", "--output", "mine.pt", "--format", "csv"],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2, done.output
        assert "exists already: --force replaces it" in done.output
    assert mine.read_text() == Path("mine.onnx.json").read_text() == "mine"
    Path("mine.pt.partial").write_text("mine, too")
    write_torch_file(run, "last", mine, force=True)
    assert mine.read_bytes() != b"mine"
    assert Path("mine.pt.partial").read_text() == "mine, too"
    assert not list(tmp_path.glob(".mine*"))


def test_an_output_folder_is_emptied_only_if_it_is_ours(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    claim_empty(ours, "recipe", force=False)
    claim_empty(ours, "recipe", force=False)  # nothing is in it yet
    (ours / "deep").mkdir()
    (ours / "deep" / "page.html").touch()
    with pytest.raises(OutputError, match="is not empty: --force replaces it"):
        claim_empty(ours, "recipe", force=False)
    claim_empty(ours, "recipe", force=True)
    assert list(ours.iterdir()) == [marker_of(ours, "recipe")]
    before = theirs(tmp_path / "theirs")
    for force in (False, True):
        with pytest.raises(RunDirError, match="is not what a recipe has made"):
            claim_empty(tmp_path / "theirs", "recipe", force)
    claim(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(RunDirError, match="is not what a recipe has made"):
        claim_empty(tmp_path / "run", "recipe", force=True)
    assert content(tmp_path / "theirs") == before


def test_a_starter_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "task.py").symlink_to(tmp_path / "elsewhere.py")
    with pytest.raises(LaunchError, match="already exist: nothing was written"):
        write_starter(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["task.py"]


def test_a_record_is_not_put_among_a_users_files(tmp_path: Path, two_ranks: TwoRanks) -> None:
    before = theirs(tmp_path)
    run: Any = SimpleNamespace(context=two_ranks, add_listener=lambda _: None, run_dir=tmp_path / "run")
    with pytest.raises(RunDirError, match="is not a directory of samestep record"):
        Recorder(run, tmp_path)
    assert content(tmp_path) == before
