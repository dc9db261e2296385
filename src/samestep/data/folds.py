"""The folds of a cross-validation: how a dataset is split into them, and the file that keeps them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from samestep.checkpoint.files import write_whole
from samestep.errors import PlanError, TaskError, TextError
from samestep.parsing.json_text import read_json

_SHOWN = 5


@dataclass(frozen=True)
class Folds:
    """The samples that validate in each fold; all others train there."""

    samples: int
    valid: tuple[tuple[int, ...], ...]
    made: Mapping[str, Any] = field(default_factory=dict)
    """How they were made, for a reader."""

    def train(self, number: int) -> list[int]:
        """Return the samples that train in a fold, in the dataset's order."""
        mine = set(self.valid[number])
        return [index for index in range(self.samples) if index not in mine]

    def write(self, path: Path) -> None:
        """Write them to a file: whole, or not at all."""
        document = {"samples": self.samples, "made": dict(self.made), "folds": self.valid}
        write_whole(path, json.dumps(document))

    @classmethod
    def read(cls, path: Path) -> Folds:
        """Return the folds of a file: ours, or one with `splits` of `val_indices`.

        Raises:
            TaskError: if it holds none that are whole: each sample validates exactly once.
        """
        try:
            document = read_json(path)
        except TextError as error:
            raise TaskError(f"the folds {path} {error}") from None
        try:
            if "splits" in document:
                valid = [split["val_indices"] for split in document["splits"]]
                made = document.get("metadata", {})
                samples = sum(map(len, valid))
            else:
                valid, made, samples = document["folds"], document["made"], document["samples"]
            found = cls(samples, tuple(tuple(fold) for fold in valid), made)
            whole = sorted(i for fold in found.valid for i in fold) == list(range(samples))
        except (KeyError, TypeError):
            raise TaskError(f"the folds {path} are not what samestep cv --only-split writes") from None
        if not whole or len(found.valid) < 2 or not all(found.valid):
            raise TaskError(
                f"the folds {path} are not whole: every sample must be in exactly one of at least two "
                "folds. Make them again with samestep cv --only-split"
            )
        return found


def split_plain(samples: int, k: int, seed: int) -> Folds:
    """Samples at random, in folds of equal sizes or one more.

    Raises:
        PlanError: if there are fewer samples than folds.
    """
    if samples < k:
        raise PlanError(f"{samples} samples cannot be split into {k} folds: set fewer folds")
    order = np.random.default_rng(seed).permutation(samples)
    return _folds([order[fold::k].tolist() for fold in range(k)], k, seed, "none")


def split_by_label(labels: Sequence[Any], k: int, seed: int) -> Folds:
    """Return every label as often in each fold as in any other, or once more.

    Raises:
        PlanError: if a label has fewer samples than there are folds.
    """
    if any(isinstance(label, (list, tuple, set, frozenset)) for label in labels):
        return _split_by_presence([frozenset(label) for label in labels], k, seed)
    refuse_rare(Counter(labels), k)
    order = np.random.default_rng(seed).permutation(len(labels)).tolist()
    first: dict[Hashable, int] = {}
    for label in labels:
        first.setdefault(label, len(first))
    # Samples are dealt to the folds, one label after the other; the next begins where the last has ended.
    dealt = sorted(order, key=lambda index: first[labels[index]])
    return _folds([dealt[fold::k] for fold in range(k)], k, seed, "by_label")


def _split_by_presence(labels: Sequence[frozenset[Hashable]], k: int, seed: int) -> Folds:
    """Iterative stratification: the rarest label first, each sample where it is wanted most."""
    refuse_rare(Counter(label for present in labels for label in present), k)
    waiting = np.random.default_rng(seed).permutation(len(labels)).tolist()
    counts = Counter(label for present in labels for label in present)
    wanted = [{label: count / k for label, count in counts.items()} for _ in range(k)]
    free = [len(labels) / k] * k
    folds: list[list[int]] = [[] for _ in range(k)]
    while waiting:
        left = Counter(label for index in waiting for label in labels[index])
        rarest = min(left, key=lambda label: (left[label], str(label)), default=None)
        chosen = [index for index in waiting if rarest is None or rarest in labels[index]]
        for index in chosen:
            at = max(range(k), key=lambda f: (wanted[f].get(rarest, 0.0), free[f], -f))
            folds[at].append(index)
            free[at] -= 1
            for label in labels[index]:
                wanted[at][label] -= 1
        taken = set(chosen)
        waiting = [index for index in waiting if index not in taken]
    return _folds(folds, k, seed, "by_label")


def split_by_group(groups: Sequence[Hashable], k: int, seed: int) -> Folds:
    """Return all samples of a group in one fold, and folds as equal as that allows.

    Raises:
        PlanError: if there are fewer groups than folds.
    """
    sizes = Counter(groups)
    if len(sizes) < k:
        raise PlanError(f"{len(sizes)} groups cannot be split into {k} folds: set fewer folds")
    order = np.random.default_rng(seed).permutation(len(sizes)).tolist()
    names = [list(sizes)[at] for at in order]
    fold_of: dict[Hashable, int] = {}
    filled = [0] * k
    for name in sorted(names, key=lambda name: -sizes[name]):
        at = min(range(k), key=lambda fold: (filled[fold], fold))
        fold_of[name], filled[at] = at, filled[at] + sizes[name]
    members: list[list[int]] = [[] for _ in range(k)]
    for index, name in enumerate(groups):
        members[fold_of[name]].append(index)
    return _folds(members, k, seed, "by_group")


def refuse_rare(counts: Mapping[Any, int], k: int) -> None:
    """Refuse labels that cannot be in every fold."""
    rare = sorted((count, str(label)) for label, count in counts.items() if count < k)
    if rare:
        shown = ", ".join(f"{label} has {count}" for count, label in rare[:_SHOWN])
        more = f" and {len(rare) - _SHOWN} more" if len(rare) > _SHOWN else ""
        raise PlanError(
            f"{k} folds by label need {k} samples of each, and {shown}{more}: set fewer folds, or stratify: none"
        )


def _folds(valid: Sequence[Sequence[int]], k: int, seed: int, how: str) -> Folds:
    # In the dataset's order: a fold is then the same dataset however it was drawn.
    ordered = tuple(tuple(sorted(int(index) for index in fold)) for fold in valid)
    made = {"k": k, "seed": seed, "stratify": how}
    return Folds(sum(map(len, ordered)), ordered, made)
