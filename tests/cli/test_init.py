"""samestep init: a config from a few answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from samestep.cli import app
from samestep.config import load_config

OWN_TASK = """
class Mine:
    def optimizers(self, model): ...
class Bare:
    pass
"""


@pytest.fixture
def new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command in this process: it starts no run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN_TASK)
    return lambda *words: CliRunner().invoke(app, ["init", *map(str, words)])


def test_a_folder_and_a_file_are_the_same(new: Callable[..., Result], tmp_path: Path) -> None:
    assert new("mine/config.yaml").exit_code == 0
    assert new("other").exit_code == 0
    for name in ("config.yaml", "task.py"):
        written = [(tmp_path / folder / name).read_text() for folder in ("mine", "other")]
        assert written[0] == written[1]


def test_what_is_given_is_in_the_config(new: Callable[..., Result], tmp_path: Path) -> None:
    done = new(
        "mine/config.yaml", "--name", "first", "--global-batch", 32, "--lanes", 4, "--epochs", 2, "--optimizer", "sgd",
        "--lr", 0.5, "--precision", "bf16", "--via", "slurm",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    config = load_config(tmp_path / "mine" / "config.yaml")
    assert (config.name, config.task, config.precision) == ("first", "task.py:MyTask", "bf16")
    assert (config.global_batch, config.lanes, config.epochs) == (32, 4, 2)
    assert config.optimizer is not None
    assert (config.optimizer.name, config.optimizer.lr) == ("sgd", 0.5)
    assert config.distributed.launch_method == "slurm"
    assert "def optimizers" not in (tmp_path / "mine" / "task.py").read_text()


def test_a_task_of_the_users_keeps_its_optimizer(new: Callable[..., Result], tmp_path: Path) -> None:
    assert new("mine.yaml", "--name", "no", "--task", "own.py:Mine").exit_code == 0
    config = load_config(tmp_path / "mine.yaml")
    assert (config.name, config.optimizer, config.params) == ("no", None, {})
    assert config.best.metric == "val_loss", "the starter's is of its own task"
    assert not (tmp_path / "task.py").exists()


def test_a_task_without_optimizers_gets_one(new: Callable[..., Result], tmp_path: Path) -> None:
    assert new("mine.yaml", "--task", "own.py:Bare").exit_code == 0
    config = load_config(tmp_path / "mine.yaml")
    assert config.optimizer is not None
    assert (config.optimizer.name, config.optimizer.lr) == ("adamw", 0.001)


def test_nothing_is_overwritten(new: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    done = new(".")
    assert (done.exit_code, "config.yaml already exist" in done.output) == (2, True)
    (tmp_path / "task.py").write_text("mine")
    done = new("other.yaml")
    assert (done.exit_code, "task.py already exist" in done.output) == (2, True)
    assert not (tmp_path / "other.yaml").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lanes", "7"], "cannot be cut into 7 equal lanes"),
        (["--optimizer", "adamwww"], "adamwww"),
        (["--task", "own.py:None"], "defines no class None"),
        (["--name", "../up"], "name"),
    ],
)
def test_answers_that_make_no_config(
    new: Callable[..., Result], tmp_path: Path, words: list[str], message: str
) -> None:
    done = new("bad.yaml", *words)
    assert (done.exit_code, message in done.output) == (2, True), done.output
    assert not (tmp_path / "bad.yaml").exists()


def test_a_template_has_its_own_answers(new: Callable[..., Result], tmp_path: Path) -> None:
    done = new("mine", "--template", "one-gpu", "--epochs", "2")
    assert (done.exit_code, "a template has its own answers" in done.output) == (2, True)
    assert not (tmp_path / "mine").exists()
