"""Retrieval of one process: against another library, by brute force, and every mistake."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import samestep
from samestep.config.evaluation import RETRIEVAL_METRICS
from samestep.errors import TaskError
from samestep.evaluation.retrieval import search
from samestep.evaluation.retrieval.measures import memory_needed

measure = samestep.evaluation.retrieval.measure


def points(samples: int, classes: int, seed: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (samples,), generator=generator)
    centres = torch.randn(classes, size, generator=torch.Generator().manual_seed(99))
    return torch.randn(samples, size, generator=generator) + 0.6 * centres[y], y


def all_distances(queries: Tensor, references: Tensor, distance: str) -> np.ndarray[Any, Any]:
    left, right = queries.double().numpy(), references.double().numpy()
    if distance == "cosine":
        left, right = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (left, right))
        return 1 - left @ right.T
    return ((left[:, None] - right) ** 2).sum(2)


def by_brute_force(
    queries: Tensor, labels: Tensor, references: Tensor, theirs: Tensor, distance: str, itself: bool
) -> dict[str, float]:
    """All references of each query in order: by distance, and by number where those are equal."""
    matrix = all_distances(queries, references, distance)
    found: dict[str, list[float]] = {}
    for number, row in enumerate(matrix):
        order = np.lexsort((np.arange(len(row)), row))
        order = order[order != number] if itself else order
        hits = (theirs[order] == labels[number]).numpy()
        total = hits.sum()
        if not total:
            continue
        ranks = np.flatnonzero(hits) + 1
        inside = ranks[ranks <= total]
        for name, value in {
            "precision_at_1": hits[0],
            "precision_at_7": hits[:7].sum() / 7,
            "recall_at_3": hits[:3].any(),
            "r_precision": len(inside) / total,
            "mean_average_precision_at_r": (np.arange(1, len(inside) + 1) / inside).sum() / total,
            "mean_reciprocal_rank": 1 / ranks[0],
        }.items():
            found.setdefault(name, []).append(float(value))
    return {name: float(np.mean(values)) for name, values in found.items()}


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("itself", [False, True])
def test_values_are_those_of_the_reference_library(distance: str, itself: bool) -> None:
    """Queries of two classes have no reference: they are left out, as there."""
    pytest.importorskip("pytorch_metric_learning")
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    def nearest(q: Tensor, k: int, r: Tensor, includes_itself: bool) -> tuple[Tensor, Tensor]:
        # Its own distances are of float32, in which some of these would be equal.
        matrix = torch.from_numpy(all_distances(q, r, distance))
        if includes_itself:
            matrix.fill_diagonal_(torch.inf)
        return matrix.topk(k, largest=False)

    theirs = AccuracyCalculator(
        include=RETRIEVAL_METRICS, knn_func=nearest, kmeans_func=lambda rows, count: None, device=torch.device("cpu")
    )
    queries, labels = points(300, 22, 1)
    references, reference_labels = points(2300, 20, 2)
    if itself:
        expected, found = (theirs.get_accuracy(queries, labels), measure(queries, labels, distance=distance))
    else:
        arguments = (queries, labels, references, reference_labels)
        expected, found = theirs.get_accuracy(*arguments), measure(*arguments, distance=distance)
    assert list(found) == list(RETRIEVAL_METRICS)
    assert found == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("group", [search.GROUP_BYTES, 1])
def test_equal_distances_are_ordered_by_number(itself: bool, group: int) -> None:
    """Whole numbers as coordinates: many distances are equal, and all of them exact."""
    generator = torch.Generator().manual_seed(3)
    queries, references = (torch.randint(0, 3, (count, 4), generator=generator).float() for count in (520, 2100))
    labels, theirs = (torch.randint(0, 9, (n,), generator=generator) for n in (520, 2100))
    labels[:3] = torch.tensor([50, 51, 51])  # one alone in its class, and a pair
    expected = (
        by_brute_force(queries, labels, queries, labels, "euclidean", True)
        if itself
        else by_brute_force(queries, labels, references, theirs, "euclidean", False)
    )
    others = () if itself else (references, theirs)
    with mock.patch.object(search, "GROUP_BYTES", group):
        found = measure(queries, labels, *others, metrics=list(expected), distance="euclidean")
        only = measure(queries, labels, *others, metrics=["mean_reciprocal_rank"], distance="euclidean")
    assert found == pytest.approx(expected, abs=1e-12)
    # Few are found among one neighbour: the others are counted in passes of their own.
    assert only["mean_reciprocal_rank"] == found["mean_reciprocal_rank"]


def test_many_neighbours_of_many_blocks() -> None:
    """Two classes among 5,000: more neighbours are held than a block of references has."""
    queries, labels = points(40, 2, 1)
    references, theirs = points(5000, 2, 2)
    expected = by_brute_force(queries, labels, references, theirs, "cosine", False)
    found = measure(queries, labels, references, theirs)
    assert found == pytest.approx({name: expected[name] for name in found}, abs=1e-12)


def test_clusters_agree_with_classes_that_lie_apart() -> None:
    queries, labels = points(600, 12, 4)
    apart = 50 * torch.nn.functional.one_hot(labels, 12).float() + torch.randn(600, 12)
    found = measure(apart, labels, metrics=["nmi", "ami"])
    assert found == pytest.approx({"nmi": 1.0, "ami": 1.0})
    near = measure(queries, labels, metrics=["ami", "precision_at_1", "nmi"], seed=7)
    assert list(near) == ["ami", "precision_at_1", "nmi"]
    assert 0.1 < near["ami"] < near["nmi"] < 0.9
    assert near == measure(queries, labels, metrics=["ami", "precision_at_1", "nmi"], seed=7)


def test_embeddings_that_are_not_finite_have_no_value() -> None:
    queries, labels = points(20, 2, 1)
    queries[7, 3] = torch.nan
    assert all(np.isnan(value) for value in measure(queries, labels).values())


def test_a_row_of_zeros_has_a_distance() -> None:
    queries, labels = points(20, 2, 1)
    queries[3] = 0
    assert 0 < measure(queries, labels)["precision_at_1"] < 1


ROWS, LABELS = points(20, 3, 1)
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "labels": ({"labels": LABELS[1:]}, "one class for each of 20 samples, and got the shape (19,)"),
    "floats": ({"labels": LABELS / 2}, "a whole number for each sample"),
    "texts": ({"labels": ["a"] * 20}, "got list"),
    "no labels": ({"references": ROWS}, "references without reference_labels"),
    "one class": ({"labels": LABELS * 0}, "one class only: all queries and references have the label 0"),
    "all alone": ({"labels": torch.arange(20)}, "no query with a reference of its class"),
    "others": ({"references": ROWS, "reference_labels": LABELS + 9}, "labels of queries are 0, 1, 2"),
    "nothing": ({"references": ROWS[:0], "reference_labels": LABELS[:0]}, "got no references"),
    "views": ({"queries": ROWS[:, None]}, "(samples, size), and queries is float32 (20, 1, 8)"),
    "numbers": ({"queries": ROWS.long()}, "queries is int64 (20, 8)"),
    "size": ({"references": ROWS[:, 1:], "reference_labels": LABELS}, "8 numbers, references of 7"),
    "metric": ({"metrics": ["precision_at_1", "map"]}, "map cannot be measured: there are precision_at_1"),
    "zero": ({"metrics": ["recall_at_0"]}, "recall_at_0 cannot be measured"),
    "no metric": ({"metrics": []}, "name at least one metric"),
    "twice": ({"metrics": ["nmi", "nmi"]}, "nmi is there twice"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes(kind: str) -> None:
    changed, message = MISTAKES[kind]
    with pytest.raises(TaskError) as caught:
        measure(**{"queries": ROWS, "labels": LABELS, **changed})
    assert message in str(caught.value)


def test_the_memory_that_is_announced_falls_with_the_ranks() -> None:
    alone, shared = (memory_needed(10**6, 10**6, [128, 512], world) for world in (1, 8))
    assert 8 << 30 < alone < 12 << 30
    assert shared < alone / 4
    half = memory_needed(10**6, 10**6, [128, 512], 1, item=2)
    assert alone / 2 < half < alone * 0.6
