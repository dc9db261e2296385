"""k-means over rows that are on several ranks: the same clusters at any number of them.

Rows become whole numbers before they are added up: whole numbers have the same sum in any order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from samestep.evaluation.retrieval.search import QUERY_BLOCK, SharedRows
from samestep.lanes.random_streams import derive
from samestep.reduce.row_shards import RowExchange

ITERATIONS = 50
"""At most; it ends when no sample changes its cluster."""
STARTS = 3
"""Number of starts, of which the best counts."""
_FRACTION = 2.0**30
"""Scale of a row's numbers; those of 2^32 rows can be added up."""
_WEIGHT = 2.0**24
"""Scale of squared distances, in the same way."""


class KMeans:
    """Lloyd's algorithm from centres that k-means++ draws. Every rank makes the same calls."""

    def __init__(self, exchange: RowExchange, shared: SharedRows, seed: int) -> None:
        self._exchange, self._shared = exchange, shared
        self._random = np.random.RandomState(derive(seed, "k-means") & 0xFFFFFFFF)
        every = exchange.collectives.gather(float(shared.rows.abs().max()) if len(shared.rows) else 0.0)
        # A power of two, so that dividing by it loses no bit.
        scale = 2.0 ** np.ceil(np.log2(max(every) or 1.0))
        self._whole = (shared.rows.double() / scale * _FRACTION).round().long()
        self._rows = self._whole.double() / _FRACTION

    def clusters(self, count: int) -> Tensor:
        """Return the numbers of the clusters of all samples of all ranks."""
        found = [self._settled(count) for _ in range(STARTS)]
        chosen = min(found, key=lambda start: start[0])[1]  # the first of those that are as good
        return torch.cat(self._exchange.collectives.gather(chosen))

    def _settled(self, count: int) -> tuple[int, Tensor]:
        """Move new centres until nothing changes. Return the sum of squared distances, and each row's cluster."""
        centres = self._first_centres(count)
        before = torch.full((len(self._rows),), -1)
        for _ in range(ITERATIONS):
            distances, chosen = self._nearest(centres)
            changed, centres = self._means(before, chosen, centres)
            if not changed:
                break
            before = chosen
        return self._total(distances), chosen

    def _total(self, distances: Tensor) -> int:
        """Return the sum over all ranks' rows, as a whole number."""
        return int(self._exchange.add_up((distances * _WEIGHT).round().long().sum().reshape(1)))

    def _first_centres(self, count: int) -> Tensor:
        """Greedy k-means++, as scikit-learn has it: of some rows that are drawn by their squared distance from
        the centres so far, the next centre is the one that leaves the least of it."""
        weights = torch.ones(len(self._rows), dtype=torch.int64)
        centres = [self._draw(weights)]
        nearest = self._nearest(centres[0][None])[0]
        tries = 2 + int(np.log(count))
        while len(centres) < count:
            weights = (nearest * _WEIGHT).round().long()
            drawn = [self._draw(weights) for _ in range(tries)]
            left = [torch.minimum(nearest, self._nearest(row[None])[0]) for row in drawn]
            totals = [self._total(distances) for distances in left]
            best = totals.index(min(totals))
            centres.append(drawn[best])
            nearest = left[best]
        return torch.stack(centres)

    def _draw(self, weights: Tensor) -> Tensor:
        """Return a row of all ranks', drawn by whole weights; the first one of all if they are all 0."""
        collectives = self._exchange.collectives
        totals = collectives.gather(int(weights.sum()))
        target = int(self._random.random_sample() * sum(totals))
        before = sum(totals[: collectives.rank])
        mine: Tensor | None = None
        if before <= target < before + totals[collectives.rank]:
            mine = self._rows[int(torch.searchsorted(weights.cumsum(0), target - before, right=True))]
        elif not sum(totals) and len(self._rows):  # fewer different rows than clusters
            mine = self._rows[0]
        return next(row for row in collectives.gather(mine) if row is not None)

    def _nearest(self, centres: Tensor) -> tuple[Tensor, Tensor]:
        """Return the squared distance of this rank's rows to the nearest centre, and which it is."""
        squares, found = (centres**2).sum(1), []
        for rows in self._rows.split(QUERY_BLOCK):
            # Of one shape always, as products of other shapes have other bits.
            block = torch.nn.functional.pad(rows, (0, 0, 0, QUERY_BLOCK - len(rows)))
            distances = (block**2).sum(1, keepdim=True) + squares - 2 * (block @ centres.T)
            nearest = distances.amin(1, keepdim=True)
            numbers = torch.arange(len(centres)).where(distances == nearest, len(centres)).amin(1)
            found.append((nearest[: len(rows), 0].clamp_min(0), numbers[: len(rows)]))
        if not found:
            return self._rows.new_zeros(0), torch.zeros(0, dtype=torch.int64)
        return torch.cat([part[0] for part in found]), torch.cat([part[1] for part in found])

    def _means(self, before: Tensor, chosen: Tensor, centres: Tensor) -> tuple[int, Tensor]:
        """Return how many rows changed their clusters, and the clusters' means; one without rows stays put."""
        clusters, size = centres.shape
        # In one message: sums of each cluster's rows, how many these are, and how many changed.
        sums = torch.zeros(clusters, size + 1, dtype=torch.int64)
        sums[:, :size].index_add_(0, chosen, self._whole)
        sums[:, size] = torch.bincount(chosen, minlength=clusters)
        changed = (before != chosen).sum().reshape(1)
        total = self._exchange.add_up(torch.cat([sums.flatten(), changed]))
        sums, counts = total[:-1].view_as(sums).split([size, 1], dim=1)
        means = sums.double() / _FRACTION / counts.clamp_min(1)
        return int(total[-1]), means.where(counts > 0, centres)
