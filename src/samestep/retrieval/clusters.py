"""k-means over rows that are on several ranks: the same clusters at any number of them.

Rows become whole numbers before they are added up: whole numbers have the same sum in any order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from samestep.lanes.rng import derive
from samestep.reduce.row_shards import RowExchange
from samestep.retrieval.search import QUERY_BLOCK, SharedRows

ITERATIONS = 50
"""At most; it ends when no sample changes its cluster."""
_FRACTION = 2.0**30
"""Of a row's numbers; those of 2^32 rows can be added up."""
_WEIGHT = 2.0**24
"""Of squared distances, in the same way."""


class KMeans:
    """Lloyd's algorithm from centres that k-means++ draws. Every rank makes the same calls."""

    def __init__(self, exchange: RowExchange, shared: SharedRows, seed: int) -> None:
        """Args:
        exchange: Between ranks.
        shared: The rows, in blocks of `QUERY_BLOCK`.
        seed: Of the first centres.
        """
        self._exchange, self._shared = exchange, shared
        self._random = np.random.RandomState(derive(seed, "k-means") & 0xFFFFFFFF)
        every = exchange.collectives.gather(
            float(shared.rows.abs().max()) if len(shared.rows) else 0.0
        )
        # A power of two, so that dividing by it loses no bit.
        scale = 2.0 ** np.ceil(np.log2(max(every) or 1.0))
        self._whole = (shared.rows.double() / scale * _FRACTION).round().long()
        self._rows = self._whole.double() / _FRACTION

    def clusters(self, count: int) -> Tensor:
        """Of all samples of all ranks, the numbers of their clusters.

        Args:
            count: How many clusters.
        """
        centres = self._first_centres(count)
        chosen = self._nearest(centres)[1]
        for _ in range(ITERATIONS):
            centres = self._means(chosen, centres)
            before, chosen = chosen, self._nearest(centres)[1]
            changed = (before != chosen).sum().reshape(1)
            if not int(self._exchange.add_up(changed)):
                break
        return torch.cat(self._exchange.collectives.gather(chosen))

    def _first_centres(self, count: int) -> Tensor:
        """k-means++: each next one is drawn by the squared distance from those before."""
        drawn = self._random.randint(self._shared.plan.rows)
        centres = [self._row(drawn)]
        nearest = None
        while len(centres) < count:
            distance = self._nearest(centres[-1][None])[0]
            nearest = distance if nearest is None else torch.minimum(nearest, distance)
            weights = (nearest * _WEIGHT).round().long()
            centres.append(self._row(self._draw(weights)))
        return torch.stack(centres)

    def _draw(self, weights: Tensor) -> int:
        """The number of a sample of all ranks, drawn by whole weights."""
        share = self._random.random_sample()
        totals = self._exchange.collectives.gather(int(weights.sum()))
        target = int(share * sum(totals))
        if not sum(totals):  # fewer different rows than clusters
            return int(share * self._shared.plan.rows)
        rank = self._exchange.collectives.rank
        before = sum(totals[:rank])
        mine: int | None = None
        if before <= target < before + totals[rank]:
            place = int(torch.searchsorted(weights.cumsum(0), target - before, right=True))
            mine = self._shared.plan.rows_of(rank).start + place
        drawn = self._exchange.collectives.gather(mine)
        return next(number for number in drawn if number is not None)

    def _row(self, number: int) -> Tensor:
        """A row that one of the ranks has."""
        held = self._shared.plan.rows_of(self._exchange.collectives.rank)
        own: Tensor | None = self._rows[number - held.start] if number in held else None
        return next(row for row in self._exchange.collectives.gather(own) if row is not None)

    def _nearest(self, centres: Tensor) -> tuple[Tensor, Tensor]:
        """Of this rank's rows, the squared distance to the nearest centre, and which it is."""
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

    def _means(self, chosen: Tensor, centres: Tensor) -> Tensor:
        """The mean of each cluster; one without samples stays where it was."""
        sums = torch.zeros(centres.shape, dtype=torch.int64).index_add_(0, chosen, self._whole)
        counts = torch.bincount(chosen, minlength=len(centres))
        sums, counts = self._exchange.add_up(sums), self._exchange.add_up(counts)
        means = sums.double() / _FRACTION / counts[:, None].clamp_min(1)
        return means.where(counts[:, None] > 0, centres)
