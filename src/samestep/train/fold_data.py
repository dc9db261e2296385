"""A task whose data are those of one fold, or all there are, and what a dataset tells for its folds."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from samestep.config.schema import FoldConfig
from samestep.data.folds import Folds
from samestep.data.map_style import is_map_style
from samestep.errors import TaskError

T = TypeVar("T")
"""A task: a lower module than that which defines them."""

_ATTRIBUTES = ("targets", "labels")


def labels_in(dataset: Any) -> Any | None:
    """Return the labels of a dataset's samples, where datasets usually have them; None if it has none."""
    for name in _ATTRIBUTES:
        found = getattr(dataset, name, None)
        if found is not None and not callable(found):
            return found
    if isinstance(dataset, Subset):
        inner = labels_in(dataset.dataset)
        return None if inner is None else [inner[index] for index in dataset.indices]
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) > 1:
        last = dataset.tensors[-1]
        whole = not torch.is_floating_point(last) and not torch.is_complex(last)
        return last if whole and last.dim() in (1, 2) else None
    return None


def plain_labels(labels: Any, samples: int, what: str) -> list[Any]:
    """Labels, or groups, as a list of plain values: one for each sample, or a list of those present.

    Args:
        labels: A tensor, an array or a list. Two-dimensional ones are 0 or 1 for each label.

    Raises:
        TaskError: if there is not one for each sample.
    """
    two_dimensional = getattr(labels, "ndim", 1) == 2
    values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    if len(values) != samples:
        raise TaskError(f"{what} returned {len(values)} entries for {samples} samples: return one for each")
    if two_dimensional:
        return [[at for at, present in enumerate(row) if present] for row in values]
    return [value.item() if hasattr(value, "item") else value for value in values]


def with_fold(task: T, fold: FoldConfig, folder: Path) -> T:
    """Return the task, its training and validation data those of one fold of its training set."""
    path = folder / fold.file
    folds = Folds.read(path)
    if fold.number >= len(folds.valid):
        raise TaskError(f"fold.number is {fold.number}, and {path} has the folds 0 to {len(folds.valid) - 1}")
    # On the object, as functions that loader processes can be sent.
    part = partial(_part, task, path, folds.samples)
    train = partial(part, "train_data", folds.train(fold.number))
    valid = partial(part, "fold_valid_data", list(folds.valid[fold.number]))
    vars(task).update(train_data=train, valid_data=valid)
    return task


def with_all_data(task: T) -> T:
    """Return the task, its training data all that it has, and nothing to validate on."""
    vars(task).update(train_data=partial(_own, task, "refit_data"), valid_data=_no_data)
    return task


def joined_data(train: Any, valid: Any) -> Any:
    """Two datasets as one.

    Raises:
        TaskError: if there is no second one, or one has no length and index.
    """
    if valid is None:
        raise TaskError("refit trains on the validation set too, and valid_data returned None: leave out refit")
    for name, dataset in (("train_data", train), ("valid_data", valid)):
        if not is_map_style(dataset):
            raise TaskError(
                f"{name} returned a {type(dataset).__name__}, which refit cannot join: that needs a dataset "
                "with a length and an index, or a refit_data(self) of the task"
            )
    return ConcatDataset([train, valid])


def _no_data() -> None:
    return None


def _own(task: Any, method: str) -> Any:
    # For the call the task's own methods are back: it may set attributes, and one may call the other.
    replaced = {name: vars(task).pop(name) for name in ("train_data", "valid_data")}
    try:
        return getattr(task, method)()
    finally:
        vars(task).update(replaced)


def _part(task: Any, path: Path, samples: int, method: str, indices: list[int]) -> Any:
    dataset = _own(task, method)
    refuse_unsplittable(dataset)
    if len(dataset) != samples:
        raise TaskError(
            f"the folds {path} are of {samples} samples, and the training set has {len(dataset)}: make "
            "them again with samestep cv --only-split, in another file"
        )
    return Subset(dataset, indices)


def refuse_unsplittable(dataset: Any) -> None:
    """Refuse data without a length and an index: it has no folds."""
    if not is_map_style(dataset):
        raise TaskError(
            f"train_data returned a {type(dataset).__name__}, which cannot be split into folds: that needs "
            "a dataset with a length and an index"
        )
