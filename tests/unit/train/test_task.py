"""The task that a config names, and what a task must define."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samestep.config import load_config
from samestep.data.batch import LaneBatch
from samestep.errors import TaskError
from samestep.train.task import Task, load_task

SOURCE = """
from samestep import Task
import helper_of_task

class Good(Task):
    def __init__(self, width: int, depth: int = 1):
        self.size = width * depth * helper_of_task.FACTOR

class Other(Good):
    pass

class NoTask:
    pass

NUMBER = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a task file; what it imports is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_task.py").write_text(SOURCE)
    (tmp_path / "helper_of_task.py").write_text("FACTOR = 10\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def load(task: str | None, **params: Any) -> Any:
    values = {"global_batch": 8, "epochs": 1, "params": params}
    return load_task(load_config(values if task is None else {**values, "task": task}))


def test_a_task_is_made_with_the_configs_params(folder: Path) -> None:
    assert load("a_task.py:Good", width=3, depth=2).size == 60
    assert load(f"{folder}/a_task.py:Other", width=3).size == 30


def test_a_tasks_file_is_a_module_that_loader_processes_can_import(folder: Path) -> None:
    task = load("a_task.py:Good", width=1)
    assert sys.modules["a_task"].Good is type(task)
    assert sys.path[0] == str(folder)
    load("a_task.py:Good", width=1)
    assert sys.path.count(str(folder)) == 1


def test_a_task_file_may_be_loaded_again_after_a_change(folder: Path) -> None:
    load("a_task.py:Good", width=1)
    (folder / "a_task.py").write_text(SOURCE.replace("FACTOR", "FACTOR + 1"))
    assert load("a_task.py:Good", width=1).size == 11


@pytest.mark.parametrize(
    ("task", "params", "message"),
    [
        (None, {}, r"the config names no task to train: set task: FILE\.py:Class"),
        ("missing.py:Good", {}, r"names .*missing\.py, and there is no such file"),
        ("a_task.py:Goood", {}, "has no class Goood; it has Good, Other"),
        ("a_task.py:NoTask", {}, "NoTask in .* is not a subclass of samestep.Task"),
        ("a_task.py:NUMBER", {}, "NUMBER in .* is not a subclass"),
        ("a_task.py:Task", {}, "Task in .* is not a subclass"),
        ("a_task.py:Good", {}, "params: Good does not take them: .*'width'"),
        ("a_task.py:Good", {"width": 1, "with": 2}, "params: Good does not take them: .*'with'"),
    ],
)
def test_a_task_that_cannot_be_made_is_refused(
    folder: Path, task: str | None, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        load(task, **params)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.py", "", r"has no class Good and no subclass of samestep\.Task"),
        ("json.py", SOURCE, r"already imported \(json\): rename it"),
        ("task.txt", SOURCE, r"task\.txt is not a Python file"),
    ],
)
def test_a_file_that_cannot_be_taken_is_refused(folder: Path, name: str, text: str, message: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(TaskError, match=message):
        load(f"{name}:Good")


def test_an_error_in_the_file_is_the_users_own_and_leaves_no_module(folder: Path) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load("broken.py:Good")
    assert "broken" not in sys.modules


# -- defaults -------------------------------------------------------------------------------------


@pytest.mark.requirement("004-6.1-2")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda task: task.model(), r"Plain must define model\(self\)"),
        (lambda task: task.train_data(), r"Plain must define train_data\(self\)"),
        (lambda task: task.loss(None, None), r"Plain must define loss\(self, model, batch\)"),
        (lambda task: task.optimizers(None), r"Plain must define optimizers.*optimizer: \{name"),
        (lambda task: task.predict_data("new"), "Plain does not know the data 'new': define predict_data"),
    ],
)
def test_what_a_task_must_define_is_named_with_its_class(call: Any, message: str) -> None:
    class Plain(Task):
        pass

    with pytest.raises(TaskError, match=message):
        call(Plain())


def test_the_rest_of_a_task_is_optional() -> None:
    task = Task()
    task.prepare_data()
    assert task.valid_data() is None
    assert task.order([]) is None
    assert (task.extra_modules(), task.schedules([], None), task.metrics()) == ((), (), {})
    model = nn.Linear(1, 1)
    assert task.export_model(model) is model
    assert torch.equal(task.collate([torch.tensor(1), torch.tensor(2)]), torch.tensor([1, 2]))


def test_an_evaluation_measures_the_training_loss_unless_defined() -> None:
    class Summing(Task):
        def loss(self, model: nn.Module, batch: LaneBatch) -> Any:
            return batch.x.sum(), len(batch)

    batch = LaneBatch(0, (torch.ones(3),), (0, 1, 2))
    assert Summing().evaluate(nn.Identity(), batch, {}) == (3.0, 3)


@pytest.mark.parametrize(
    ("data", "expected"), [((torch.ones(2), torch.zeros(2)), 2.0), ([torch.ones(3), 0], 3.0), (torch.ones(4), 4.0)]
)
def test_a_model_is_called_with_the_inputs_of_a_batch(data: Any, expected: float) -> None:
    batch = LaneBatch(0, data, (0,))
    assert Task().predict(nn.Identity(), batch).sum() == expected


def test_several_inputs_are_several_arguments() -> None:
    class Two(Task):
        def model_inputs(self, batch: LaneBatch, method: str = "forward") -> Any:
            return batch.data

    class Add(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

    batch = LaneBatch(0, (torch.ones(1), torch.ones(1)), (0,))
    assert Two().predict(Add(), batch).item() == 2.0
