"""A task with the data of one fold, and what a dataset tells for its folds."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from samestep import Task
from samestep.config.schema import FoldConfig
from samestep.data.folds import Folds, split_plain
from samestep.errors import PlanError, TaskError
from samestep.train.choose_folds import SplitRequest, split_dataset
from samestep.train.fold_data import labels_in, with_all_data, with_fold


class Rows(Task):
    """Augments where it trains; remembers that its data was made."""

    made = 0

    def train_data(self) -> Any:
        self.made += 1
        return TensorDataset(100 + torch.arange(10), torch.arange(10) % 2)

    def fold_valid_data(self) -> Any:
        return TensorDataset(torch.arange(10), torch.arange(10) % 2)


class Plain(Rows):
    fold_valid_data = Task.fold_valid_data


@pytest.fixture
def folds(tmp_path: Path) -> Folds:
    made = split_plain(10, 3, seed=0)
    made.write(tmp_path / "folds.json")
    return made


def fold(number: int) -> FoldConfig:
    return FoldConfig(file="folds.json", number=number)


def test_a_fold_trains_on_the_others_and_validates_without_augmentation(tmp_path: Path, folds: Folds) -> None:
    task = with_fold(Rows(), fold(1), tmp_path)
    train, valid = task.train_data(), task.valid_data()
    assert [int(x) - 100 for x, _ in train] == folds.train(1)
    assert [int(x) for x, _ in valid] == list(folds.valid[1])
    assert task.made == 1, "what train_data sets stays with the task"


def test_without_its_own_view_the_training_set_validates(tmp_path: Path, folds: Folds) -> None:
    task = with_fold(Plain(), fold(0), tmp_path)
    assert [int(x) - 100 for x, _ in task.valid_data()] == list(folds.valid[0])


def test_a_task_of_a_fold_can_be_sent_to_loader_processes(tmp_path: Path, folds: Folds) -> None:
    task = pickle.loads(pickle.dumps(with_fold(Rows(), fold(2), tmp_path)))
    assert len(task.valid_data()) == len(folds.valid[2])


def test_folds_of_other_data_are_refused(tmp_path: Path) -> None:
    split_plain(11, 3, seed=0).write(tmp_path / "folds.json")
    with pytest.raises(TaskError, match="of 11 samples, and the training set has 10"):
        with_fold(Rows(), fold(0), tmp_path).train_data()
    with pytest.raises(TaskError, match="has the folds 0 to 2"):
        with_fold(Rows(), fold(3), tmp_path)


def test_labels_are_found_where_datasets_have_them() -> None:
    y = torch.tensor([3, 1, 2])
    pairs = TensorDataset(torch.zeros(3, 2), y)
    assert labels_in(pairs) is y
    assert labels_in(TensorDataset(torch.zeros(3, 2), torch.zeros(3))) is None
    assert [int(label) for label in labels_in(Subset(pairs, [2, 0]))] == [2, 3]
    pairs.targets = ["c", "a", "b"]  # type: ignore[attr-defined]
    assert labels_in(pairs) == ["c", "a", "b"]
    assert labels_in([1, 2]) is None


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


class Labelled(Task):
    def __init__(self, labels: Any = None, groups: Any = None) -> None:
        self.labels, self.groups = labels, groups

    def fold_labels(self, dataset: Any) -> Any:
        return self.labels

    def fold_groups(self, dataset: Any) -> Any:
        return self.groups


def split(task: Task, stratify: Any = "auto", data: Any = range(6)) -> tuple[Folds, str]:
    return split_dataset(task, list(data), SplitRequest(2, stratify, 0))


def test_how_folds_are_made_follows_from_what_is_known() -> None:
    labels, groups = ["a", "b"] * 3, [1, 1, 2, 2, 3, 3]
    assert split(Labelled())[1].startswith("at random, since Labelled knows no labels")
    assert split(Labelled(labels))[1] == "by label"
    assert split(Labelled(labels, groups))[1] == "by group"
    assert split(Labelled(labels, groups), "by_label")[1] == "by label"
    assert split(Labelled(labels), "none")[1] == "at random"
    assert "c has 1" in split(Labelled(["a", "a", "b", "b", "b", "c"]))[1]
    present = torch.tensor([[1, 0], [1, 1], [0, 1], [1, 0], [0, 1], [1, 1]])
    assert split(Labelled(present))[1] == "by label"


@pytest.mark.parametrize(
    ("task", "stratify", "error", "message"),
    [
        (Labelled(), "by_label", TaskError, "define fold_labels"),
        (Labelled(), "by_group", TaskError, "define fold_groups"),
        (Labelled(["a"]), "auto", TaskError, "fold_labels returned 1 entries for 6 samples"),
        (Labelled(["a"] * 5 + ["b"]), "by_label", PlanError, "b has 1"),
    ],
)
def test_what_cannot_be_split_as_requested_is_refused(
    task: Task, stratify: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        split(task, stratify)


def test_data_without_an_index_has_no_folds() -> None:
    with pytest.raises(TaskError, match="Stream, which cannot be split"):
        split_dataset(Labelled(), Stream(), SplitRequest(2))


class Whole(Rows):
    def valid_data(self) -> Any:
        return TensorDataset(torch.arange(200, 203), torch.zeros(3, dtype=torch.long))


def test_refit_trains_on_all_data_and_validates_on_none() -> None:
    task = with_all_data(Whole())
    assert [int(x) for x, _ in task.train_data()] == [*range(100, 110), 200, 201, 202]
    assert task.valid_data() is None
    assert task.made == 1, "what train_data sets stays with the task"
    assert len(pickle.loads(pickle.dumps(task)).train_data()) == 13, "loader processes get it"


def test_refit_of_a_task_with_its_own_view_takes_that() -> None:
    class Own(Whole):
        def refit_data(self) -> Any:
            return [*self.train_data(), *self.valid_data(), *self.valid_data()]

    assert len(with_all_data(Own()).train_data()) == 16


def test_refit_refuses_what_it_cannot_join() -> None:
    with pytest.raises(TaskError, match="valid_data returned None: leave out refit"):
        with_all_data(Rows()).train_data()

    class Streams(Whole):
        def valid_data(self) -> Any:
            return Stream()

    with pytest.raises(TaskError, match="valid_data returned a Stream, which refit cannot join"):
        with_all_data(Streams()).train_data()
