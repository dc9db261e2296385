"""Folds: whole, alike in what they are to be alike in, and the same again from their file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from samestep.data.folds import Folds, split_by_group, split_by_label, split_plain
from samestep.errors import PlanError, TaskError


def assert_whole(folds: Folds, samples: int) -> None:
    assert sorted(index for fold in folds.valid for index in fold) == list(range(samples))
    for number, fold in enumerate(folds.valid):
        assert sorted([*folds.train(number), *fold]) == list(range(samples))


def test_plain_folds_are_whole_and_as_equal_as_can_be() -> None:
    folds = split_plain(23, 5, seed=1)
    assert_whole(folds, 23)
    assert sorted(map(len, folds.valid)) == [4, 4, 5, 5, 5]
    assert split_plain(23, 5, seed=1) == folds
    assert split_plain(23, 5, seed=2) != folds


def test_folds_by_label_have_as_many_of_each() -> None:
    labels = ["a"] * 31 + ["b"] * 7 + ["c"] * 12
    folds = split_by_label(labels, 4, seed=0)
    assert_whole(folds, 50)
    for label in "abc":
        counts = [sum(labels[i] == label for i in fold) for fold in folds.valid]
        assert max(counts) - min(counts) <= 1
    sizes = [len(fold) for fold in folds.valid]
    assert max(sizes) - min(sizes) <= 1


def test_folds_by_the_presence_of_labels_have_each_of_them() -> None:
    labels = [[name for bit, name in enumerate("wxyz") if index >> bit & 1] for index in range(48)]
    labels += [["rare"], ["rare", "w"], ["rare"]]
    folds = split_by_label(labels, 3, seed=5)
    assert_whole(folds, 51)
    for label in ("w", "x", "y", "z", "rare"):
        counts = [sum(label in labels[i] for i in fold) for fold in folds.valid]
        assert max(counts) - min(counts) <= 2, (label, counts)
    assert all(any("rare" in labels[i] for i in fold) for fold in folds.valid)


def test_a_group_is_in_one_fold() -> None:
    groups = [f"patient {index % 11}" for index in range(60)]
    folds = split_by_group(groups, 3, seed=0)
    assert_whole(folds, 60)
    homes = [{groups[i] for i in fold} for fold in folds.valid]
    assert sum(map(len, homes)) == 11
    sizes = Counter(len(fold) for fold in folds.valid)
    assert max(sizes) - min(sizes) <= 6


def test_what_is_too_few_is_refused_with_all_that_are() -> None:
    with pytest.raises(PlanError, match="b has 2, c has 3: set fewer folds"):
        split_by_label(["a"] * 9 + ["b"] * 2 + ["c"] * 3, 4, seed=0)
    with pytest.raises(PlanError, match="rare has 1"):
        split_by_label([["a"], ["a", "rare"], ["a"]], 2, seed=0)
    with pytest.raises(PlanError, match="3 samples cannot be split into 4"):
        split_plain(3, 4, seed=0)
    with pytest.raises(PlanError, match="2 groups cannot be split into 3"):
        split_by_group(["p", "q", "p"], 3, seed=0)


def test_a_file_gives_the_same_folds_again(tmp_path: Path) -> None:
    folds = split_plain(10, 3, seed=0)
    folds.write(tmp_path / "folds.json")
    assert Folds.read(tmp_path / "folds.json") == folds


def test_files_of_splits_are_read_too(tmp_path: Path) -> None:
    splits = [{"train_indices": [2, 3], "val_indices": [0, 1]}, {"train_indices": [0, 1], "val_indices": [2, 3]}]
    (tmp_path / "s.json").write_text(json.dumps({"splits": splits, "n_folds": 2}))
    assert Folds.read(tmp_path / "s.json").valid == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    "document",
    [
        "[]", "{}", "3", '{"folds": 3, "made": {}, "samples": 2}',
        '{"folds": [[0], [0, 1]], "made": {}, "samples": 2}',
        '{"folds": [[0, 1]], "made": {}, "samples": 2}',
        '{"folds": [[0, 1], []], "made": {}, "samples": 2}',
        '{"folds": [["a"], [1]], "made": {}, "samples": 2}',
        '{"splits": [{"val": [0]}]}', '{"folds": [[0',
    ],
)  # fmt: skip
def test_a_file_that_holds_no_folds_is_refused(tmp_path: Path, document: str) -> None:
    (tmp_path / "folds.json").write_text(document)
    with pytest.raises(TaskError, match=r"folds\.json"):
        Folds.read(tmp_path / "folds.json")
