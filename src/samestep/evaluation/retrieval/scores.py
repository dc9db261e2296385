"""Precision, recall and ranks, from the nearest references of each query.

The definitions are those of pytorch-metric-learning's AccuracyCalculator. Queries of whose class there is no
reference are left out. A sum is made for each block of queries, and these are added in their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.config.evaluation import CLUSTERING_METRICS, at_k
from samestep.errors import TaskError
from samestep.evaluation.retrieval.search import QueryBlock, Search, SharedRows

_RECIPROCAL = "mean_reciprocal_rank"
_AT_R = ("r_precision", "mean_average_precision_at_r")


class NeighbourScores:
    """Measures a search's results. Every rank makes the same calls."""

    def __init__(self, search: Search, queries: SharedRows, metrics: Sequence[str]) -> None:
        self._search, self._labels = search, queries.labels
        self._metrics = [name for name in metrics if name not in CLUSTERING_METRICS]
        self._totals = _references_of_class(search, queries)
        """Per query, the number of references of its class, without itself."""

    def measure(self) -> dict[str, float]:
        """Return the metrics by name, the same on every rank."""
        if not self._metrics:
            return {}
        gather = self._search.exchange.collectives.gather
        sums: dict[int, dict[str, float]] = {}
        open_blocks: dict[int, Tensor] = {}
        for block, _, ids in self._search.nearest(self._k()):
            matches = self._matches(block, ids.cpu())
            sums[block.number] = self._sums(block, matches)
            if _RECIPROCAL in self._metrics:
                ranks = _first_ranks(matches)
                if bool(((ranks == 0) & (self._totals_of(block) > 0)).any()):
                    open_blocks[block.number] = ranks
                sums[block.number][_RECIPROCAL] = _reciprocal_sum(ranks)
        deeper = sorted(number for numbers in gather(list(open_blocks)) for number in numbers)
        for block, ranks in self._search.first_matches(deeper) if deeper else ():
            found = open_blocks[block.number]
            sums[block.number][_RECIPROCAL] = _reciprocal_sum(ranks.where(found == 0, found))
        by_block = {number: row for rows in gather(sums) for number, row in rows.items()}
        count = int((self._totals > 0).sum())
        return {
            name: math.fsum(by_block[number][name] for number in sorted(by_block)) / count for name in self._metrics
        }

    def _k(self) -> int:
        """Return how many neighbours the metrics need."""
        wanted = [1, *(found[1] for name in self._metrics if (found := at_k(name)) is not None)]
        if any(name in _AT_R for name in self._metrics):
            wanted.append(int(self._totals.max()))
        return min(max(wanted), self._search.references.plan.rows)

    def _totals_of(self, block: QueryBlock) -> Tensor:
        return self._totals[block.ids.start : block.ids.stop]

    def _matches(self, block: QueryBlock, ids: Tensor) -> Tensor:
        """Return for each query and neighbour whether both are of one class."""
        ids = ids[: len(block.ids)]
        own = self._labels[block.ids.start : block.ids.stop]
        return (self._search.references.labels[ids.clamp_min(0)] == own[:, None]) & (ids >= 0)

    def _sums(self, block: QueryBlock, matches: Tensor) -> dict[str, float]:
        """Return the sums, by metric, over a block's queries that have references of their class."""
        totals = self._totals_of(block)
        matches, totals = matches[totals > 0], totals[totals > 0]
        found = {}
        for name in self._metrics:
            at = at_k(name)
            if at is not None:
                kind, k = at
                hits = matches[:, :k].sum(1).double()
                values = hits / k if kind == "precision" else (hits > 0).double()
            elif name in _AT_R:
                values = _at_r(name, matches, totals)
            else:
                continue
            found[name] = math.fsum(values.tolist())
        return found


def _at_r(name: str, matches: Tensor, totals: Tensor) -> Tensor:
    """Return for each query how its R nearest references do, where R are of its class."""
    ranks = torch.arange(1, matches.shape[1] + 1, dtype=torch.float64)
    counted = matches & (ranks <= totals[:, None])
    if name == "r_precision":
        return counted.sum(1).double() / totals
    precisions = counted.cumsum(1) * counted / ranks
    return precisions.sum(1) / totals


def _first_ranks(matches: Tensor) -> Tensor:
    """Return for each query which neighbour is its first match, from 1; 0 if none is."""
    ranks = torch.arange(1, matches.shape[1] + 1)
    none = matches.shape[1] + 1
    first = ranks.where(matches, none).amin(1)
    return first.where(first < none, 0)


def _reciprocal_sum(ranks: Tensor) -> float:
    return math.fsum(1 / rank for rank in ranks.tolist() if rank)


def _references_of_class(search: Search, queries: SharedRows) -> Tensor:
    classes, counts = torch.unique(search.references.labels, return_counts=True)
    place = torch.searchsorted(classes, queries.labels).clamp_max(len(classes) - 1)
    found: Tensor = counts[place].where(classes[place] == queries.labels, 0)
    found = found - 1 if search.excludes_itself else found
    if len(classes) == 1 and bool((queries.labels == classes[0]).all()):
        raise TaskError(
            f"retrieval found one class only: all queries and references have the label {int(classes[0])}, "
            "and every neighbour would be right. Check the labels"
        )
    if not bool((found > 0).any()):
        raise TaskError(
            f"retrieval found no query with a reference of its class: labels of queries are "
            f"{_few(queries.labels)}, those of references {_few(classes)}"
            + (", each on one sample only" if search.excludes_itself else "")
        )
    return found


def _few(labels: Tensor) -> str:
    shown = labels.unique().tolist()
    return ", ".join(map(str, shown[:5])) + (", ..." if len(shown) > 5 else "")
