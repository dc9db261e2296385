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
from samestep.lanes.plan import BatchPlan
from samestep.lanes.random_streams import derive, order_rng

Indices = NDArray[np.int64]
Order = Callable[[int, int], Sequence[int] | Indices]
"""`order(seed, epoch)` returns the indices of an epoch's samples, in order."""


def shuffled(samples: int) -> Order:
    """Return every sample once, in a new random order each epoch."""
    return lambda seed, epoch: order_rng(seed, epoch).permutation(samples)


def sequential(samples: int) -> Order:
    """Return every sample once, in the dataset's order."""
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
    """Return every sample once; samples of one group stay together, groups and insides shuffled.

    Args:
        groups: The group of each sample of the dataset.
    """
    codes = _codes(groups)
    members = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])

    def order(seed: int, epoch: int) -> Indices:
        rng = order_rng(seed, epoch)
        return np.concatenate([rng.permutation(members[g]) for g in rng.permutation(len(members))])

    return order


def by_lane(samples: int, global_batch: int, lanes: int) -> Order:
    """Return each lane visits a part of its own, `lane_part`, in a new random order each epoch.

    A rank then reads only the parts of its lanes, and may keep them: the more ranks, the less each
    one holds. All steps of an epoch are whole: less than a lane's batch is left out of each part,
    other samples in every epoch.

    Args:
        samples: Of the whole dataset.
        global_batch: The config's.
        lanes: The config's.
    """
    plan = BatchPlan(global_batch, lanes)
    if samples // lanes < plan.lane_batch:
        raise TaskError(
            f"by_lane() over {samples} samples: each of {lanes} lanes has {samples // lanes} of them, "
            f"fewer than its {plan.lane_batch} of a global batch of {global_batch}. Use a smaller "
            "global_batch, or more data"
        )
    size, steps = plan.lane_batch, samples // lanes // plan.lane_batch

    def order(seed: int, epoch: int) -> Indices:
        root, parts = derive(seed, "lane parts"), []
        for lane in range(lanes):
            part = lane_part(samples, lanes, lane)
            drawn = order_rng(derive(root, lane), epoch).permutation(len(part))
            parts.append(part.start + drawn[: steps * size].reshape(steps, size))
        return np.stack(parts, axis=1).reshape(-1)

    return order


def lane_part(samples: int, lanes: int, lane: int) -> range:
    """Return the samples that a lane visits with `by_lane`."""
    return range(lane * samples // lanes, (lane + 1) * samples // lanes)


def _codes(names: Sequence[Hashable]) -> Indices:
    """Return a number for each name, in the order of first appearance."""
    if not len(names):
        raise TaskError("an order over no samples: give one label or group per sample")
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(name, len(known)) for name in names], dtype=np.int64)
