"""The order in which an epoch visits the samples: pure functions of (seed, epoch).

An order is any callable `order(seed, epoch) -> sequence of sample indices`. It must return
the same number of indices in every epoch; it may repeat or leave out samples.

    class Mine(samestep.Task):
        def order(self, dataset):
            return samestep.orders.class_balanced(dataset.labels)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from samestep.errors import TaskError
from samestep.lanes.rng import order_rng

Indices = NDArray[np.int64]
Order = Callable[[int, int], Sequence[int] | Indices]
"""`order(seed, epoch)` returns the indices of an epoch's samples, in order."""


def shuffled(samples: int) -> Order:
    """Every sample once, in a new random order each epoch."""
    return lambda seed, epoch: order_rng(seed, epoch).permutation(samples)


def sequential(samples: int) -> Order:
    """Every sample once, in the dataset's order."""
    return lambda seed, epoch: np.arange(samples)


def weighted(weights: Sequence[float], samples: int | None = None) -> Order:
    """Draws with replacement, each sample in proportion to its weight.

    Args:
        weights: One per sample of the dataset.
        samples: How many an epoch draws; as many as there are weights unless given.
    """
    shares = np.asarray(weights, dtype=np.float64)
    if shares.ndim != 1 or (shares < 0).any() or not shares.sum() > 0:
        raise TaskError("weighted() needs one weight per sample, none negative, not all zero")
    edges = np.cumsum(shares / shares.sum())
    count = len(shares) if samples is None else samples

    def order(seed: int, epoch: int) -> Indices:
        draws = order_rng(seed, epoch).random_sample(count)
        return np.minimum(np.searchsorted(edges, draws, side="right"), len(shares) - 1)

    return order


def class_balanced(labels: Sequence[Hashable], samples: int | None = None) -> Order:
    """Draws with replacement, every class equally often in expectation.

    Args:
        labels: The class of each sample of the dataset.
        samples: How many an epoch draws; as many as there are labels unless given.
    """
    codes = _codes(labels)
    counts = np.bincount(codes)
    return weighted((1.0 / counts)[codes].tolist(), samples)


def grouped(groups: Sequence[Hashable]) -> Order:
    """Every sample once; samples of one group stay together, groups and insides shuffled.

    Args:
        groups: The group of each sample of the dataset.
    """
    codes = _codes(groups)
    members = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])

    def order(seed: int, epoch: int) -> Indices:
        rng = order_rng(seed, epoch)
        return np.concatenate([rng.permutation(members[g]) for g in rng.permutation(len(members))])

    return order


def _codes(names: Sequence[Hashable]) -> Indices:
    """A number for each name, in the order of first appearance."""
    if not len(names):
        raise TaskError("an order over no samples: give one label or group per sample")
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(name, len(known)) for name in names], dtype=np.int64)
