"""Splits a config's training set into folds, and looks at what its task can measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from samestep.config import Config
from samestep.data.folds import Folds, split_by_group, split_by_label, split_plain
from samestep.errors import PlanError, TaskError
from samestep.train.fold_data import plain_labels, refuse_unsplittable
from samestep.train.task import Task, load_task

Stratify = Literal["auto", "by_label", "by_group", "none"]


@dataclass(frozen=True)
class SplitRequest:
    """Settings of the split of a training set."""

    k: int
    stratify: Stratify = "auto"
    """auto: by group if there are groups, else by label if every label has enough samples."""
    seed: int = 0


def make_folds(config: Config, request: SplitRequest) -> tuple[Folds, str]:
    """Return the folds of a config's training set, and why they were made that way.

    Raises:
        TaskError: if the data or its labels cannot be split.
        PlanError: if there are too few samples of something.
    """
    task = load_task(config.model_copy(update={"fold": None}))
    task.prepare_data()
    return split_dataset(task, task.train_data(), request)


def split_dataset(task: Task, dataset: Any, request: SplitRequest) -> tuple[Folds, str]:
    """Return the folds of a task's training set, and why they were made that way."""
    refuse_unsplittable(dataset)
    groups = _values(task.fold_groups(dataset), dataset, "fold_groups")
    labels = _values(task.fold_labels(dataset), dataset, "fold_labels")
    how, k, seed, name = request.stratify, request.k, request.seed, type(task).__name__
    if how == "by_group" or (how == "auto" and groups is not None):
        if groups is None:
            raise TaskError(f"stratify is by_group, and {name} knows no groups: define fold_groups(self, dataset)")
        return split_by_group(groups, k, seed), "by group"
    if how == "by_label":
        if labels is None:
            raise TaskError(
                f"stratify is by_label, and {name} knows no labels: define fold_labels(self, dataset), or "
                "set stratify: none"
            )
        return split_by_label(labels, k, seed), "by label"
    plain = split_plain(len(dataset), k, seed)
    if how == "none":
        return plain, "at random"
    if labels is None:
        return plain, f"at random, since {name} knows no labels or groups"
    try:
        return split_by_label(labels, k, seed), "by label"
    except PlanError as rare:
        return plain, f"at random: {rare}"


def _values(found: Any, dataset: Any, method: str) -> Sequence[Any] | None:
    return None if found is None else plain_labels(found, len(dataset), method)


def metric_names(task: Task, config: Config) -> list[str]:
    """Return the values that an evaluation reports, by the names that are known before there is one."""
    names = ["val_loss", *task.metrics()]
    ema = [f"ema_{name}" for name in names] if config.ema is not None else []
    return [*names, *ema]
