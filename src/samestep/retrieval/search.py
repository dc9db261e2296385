"""The nearest of many references for each of many queries, exactly, the same at any number of ranks.

Queries and references meet block by block: every matrix of distances has the same samples and the same
shape whatever the number of ranks, so that it has the same bits. Distances are of float64. Equal ones are
ordered by the references' numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.config.evaluation import Distance
from samestep.reduce.row_shards import RowExchange, ShardPlan

QUERY_BLOCK, REFERENCE_BLOCK = 256, 2048
GROUP_BYTES = 256 << 20
"""For what is known of queries while references pass by; more queries than fit take another pass."""
_SPARE = 32
"""Candidates beyond 2 k that are kept before they are sorted."""


@dataclass(frozen=True)
class SharedRows:
    """Embeddings of a dataset, each on one rank, and all their labels."""

    plan: ShardPlan
    rows: Tensor
    """This rank's, of float32 or float16, in host memory."""
    labels: Tensor
    """Of all samples, of int64, in host memory: on every rank."""


@dataclass(frozen=True)
class QueryBlock:
    """Some queries, on the device."""

    number: int
    ids: range
    rows: Tensor
    """As `prepared` made them."""


def prepared(rows: Tensor, block: int, distance: Distance) -> Tensor:
    """Rows as distances need them: in float64, of length 1 for cosine, filled up to a whole block."""
    whole = torch.zeros(block, rows.shape[1], dtype=torch.float64, device=rows.device)
    whole[: len(rows)] = rows
    if distance == "cosine":
        # A row of zeros stays one, as far from everything as what is perpendicular.
        whole /= whole.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return whole


class Search:
    """Finds references for a rank's queries. Every rank makes the same calls."""

    def __init__(
        self,
        exchange: RowExchange,
        queries: SharedRows,
        references: SharedRows | None,
        distance: Distance,
        device: torch.device,
    ) -> None:
        """Args:
        exchange: Between ranks.
        queries: In blocks of `QUERY_BLOCK`.
        references: In blocks of `REFERENCE_BLOCK`.
        distance: Between embeddings.
        device: Where distances are computed.
        """
        self.exchange, self._queries, self._distance = exchange, queries, distance
        # No other kind of device has float64 everywhere.
        self._device = device if device.type == "cuda" else torch.device("cpu")
        self.excludes_itself = references is None
        """Whether a query is among the references, and no neighbour of itself."""
        self.references = queries_again(exchange, queries) if references is None else references

    def nearest(self, k: int) -> Iterator[tuple[QueryBlock, Tensor, Tensor]]:
        """This rank's blocks, with distances and numbers of each query's k nearest references.

        Where there are fewer, distances are infinite and numbers -1.

        Args:
            k: How many neighbours.
        """
        at_once = max(1, GROUP_BYTES // (QUERY_BLOCK * bytes_of_query(k, self.size)))
        for group in self._groups(range(self._queries.plan.blocks), at_once):
            found = [_Candidates(k) for _ in group]
            for number, block in self._reference_blocks():
                for query, candidates in zip(group, found, strict=True):
                    candidates.add(self.distances(query, block, number), number * REFERENCE_BLOCK)
            for query, candidates in zip(group, found, strict=True):
                yield query, *candidates.sorted()

    def first_matches(self, numbers: Sequence[int]) -> Iterator[tuple[QueryBlock, Tensor]]:
        """Blocks of queries, with the rank of each one's nearest reference of its own class, from 1.

        It is 0 for queries of which no reference is of the same class.

        Args:
            numbers: Of the wanted blocks of all ranks.
        """
        at_once = max(1, GROUP_BYTES // (QUERY_BLOCK * bytes_of_query(1, self.size)))
        for group in self._groups(numbers, at_once):
            found = [_FirstMatch(self._device) for _ in group]
            for number, block in self._reference_blocks():
                for query, first in zip(group, found, strict=True):
                    distances, same = (
                        self.distances(query, block, number),
                        self._same(query, number),
                    )
                    first.seek(distances.masked_fill_(~same, torch.inf), self._ids(number))
            for number, block in self._reference_blocks():
                for query, first in zip(group, found, strict=True):
                    first.count(self.distances(query, block, number), self._ids(number))
            for query, first in zip(group, found, strict=True):
                yield query, first.ranks()[: len(query.ids)].cpu()

    @property
    def size(self) -> int:
        """How many numbers an embedding has."""
        return self._queries.rows.shape[1]

    def distances(self, query: QueryBlock, block: Tensor, number: int) -> Tensor:
        """Of a block of queries to a block of references; infinite where there is no pair.

        Args:
            query: The queries.
            block: The references, as `prepared` made them.
            number: The block's number.
        """
        products = query.rows @ block.T
        if self._distance == "cosine":
            found = products.neg_().add_(1)
        else:
            squares = (query.rows**2).sum(1, keepdim=True) + (block**2).sum(1)
            found = squares.sub_(products, alpha=2).clamp_min_(0)
        held = self.references.plan.rows_in(number)
        found[:, len(held) :] = torch.inf
        if self.excludes_itself:
            first, last = max(query.ids.start, held.start), min(query.ids.stop, held.stop)
            both = torch.arange(first, max(first, last), device=found.device)
            found[both - query.ids.start, both - held.start] = torch.inf
        return found

    def _same(self, query: QueryBlock, number: int) -> Tensor:
        """Of which pairs of a block of queries and one of references both have the same label."""
        held = self.references.plan.rows_in(number)
        own = self._queries.labels[query.ids.start : query.ids.stop]
        theirs = self.references.labels[held.start : held.stop]
        whole = torch.zeros(QUERY_BLOCK, REFERENCE_BLOCK, dtype=torch.bool)
        whole[: len(own), : len(theirs)] = own[:, None] == theirs
        return whole.to(self._device)

    def _ids(self, number: int) -> Tensor:
        start = number * REFERENCE_BLOCK
        return torch.arange(start, start + REFERENCE_BLOCK, device=self._device)

    def _groups(self, numbers: Sequence[int], at_once: int) -> Iterator[list[QueryBlock]]:
        """This rank's blocks among these; as many groups on each rank, for which references pass by."""
        plan, rank = self._queries.plan, self.exchange.collectives.rank
        by_rank = [
            [number for number in numbers if number in plan.blocks_of(other)]
            for other in range(plan.world)
        ]
        passes = -(-max(map(len, by_rank)) // at_once)
        for start in range(0, passes * at_once, at_once):
            yield [self._query_block(number) for number in by_rank[rank][start : start + at_once]]

    def _query_block(self, number: int) -> QueryBlock:
        ids = self._queries.plan.rows_in(number)
        first = self._queries.plan.rows_of(self.exchange.collectives.rank).start
        rows = self._queries.rows[ids.start - first : ids.stop - first].to(self._device)
        return QueryBlock(number, ids, prepared(rows, QUERY_BLOCK, self._distance))

    def _reference_blocks(self) -> Iterator[tuple[int, Tensor]]:
        held = self.references
        blocks = self.exchange.blocks(held.plan, held.rows, self._device)
        for number, rows in enumerate(blocks):
            yield number, prepared(rows, REFERENCE_BLOCK, self._distance)


def queries_again(exchange: RowExchange, queries: SharedRows) -> SharedRows:
    """Queries as references: the same rows in other blocks."""
    held = queries.plan.rows_of(exchange.collectives.rank)
    plan = ShardPlan(queries.plan.rows, REFERENCE_BLOCK, queries.plan.world)
    return SharedRows(plan, exchange.settle(plan, held, queries.rows), queries.labels)


def bytes_of_query(k: int, size: int) -> int:
    """About what is held for one query while its k nearest references are sought."""
    return 16 * (2 * k + _SPARE) + 8 * size


class _Candidates:
    """The k nearest references of a block of queries, among those that have passed so far.

    Blocks of references come in the order of their numbers. Whoever comes later is nearer or left out,
    and sorting is stable: so equal distances stay in the order of the numbers.
    """

    def __init__(self, k: int) -> None:
        self._k, self._width = k, 0
        self._distances: list[Tensor] = []
        self._ids: list[Tensor] = []
        self._limit: Tensor | None = None
        """Of each query, the k-th distance so far."""

    def add(self, distances: Tensor, start: int) -> None:
        """Take a block of references, whose first one has this number."""
        if self._limit is None:
            ids = torch.arange(start, start + distances.shape[1], device=distances.device)
            self._append(distances, ids.expand_as(distances))
            self._limit = self._sort()
            return
        rows, columns = (distances < self._limit).nonzero(as_tuple=True)
        counts = torch.bincount(rows, minlength=len(distances))
        most = int(counts.max())
        if not most:
            return
        places = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        nearer = distances.new_full((len(distances), most), torch.inf)
        nearer[rows, places] = distances[rows, columns]
        ids = torch.full_like(nearer, -1, dtype=torch.int64)
        ids[rows, places] = columns + start
        self._append(nearer, ids)
        if self._width > 2 * self._k + _SPARE:
            self._limit = self._sort()

    def _append(self, distances: Tensor, ids: Tensor) -> None:
        self._distances.append(distances)
        self._ids.append(ids)
        self._width += distances.shape[1]

    def _sort(self) -> Tensor:
        """Keep the k nearest; returns the k-th distance."""
        distances, order = torch.cat(self._distances, 1).sort(dim=1, stable=True)
        ids = torch.cat(self._ids, 1).gather(1, order[:, : self._k])
        # Copies: a part of a tensor keeps the whole of it.
        self._distances, self._ids = [distances[:, : self._k].clone()], [ids]
        self._width = self._distances[0].shape[1]
        if self._width < self._k:
            return distances.new_full((len(distances), 1), torch.inf)
        return self._distances[0][:, -1:].clone()

    def sorted(self) -> tuple[Tensor, Tensor]:
        """Distances and numbers, nearest first."""
        self._sort()
        distances, ids = self._distances[0], self._ids[0]
        missing = self._k - distances.shape[1]
        if missing > 0:
            distances = torch.nn.functional.pad(distances, (0, missing), value=torch.inf)
            ids = torch.nn.functional.pad(ids, (0, missing), value=-1)
        return distances, ids.masked_fill(distances.isinf(), -1)


class _FirstMatch:
    """The nearest reference of its own class of each of a block's queries, and how many are before it."""

    def __init__(self, device: torch.device) -> None:
        shape = (QUERY_BLOCK, 1)
        self._distances = torch.full(shape, torch.inf, dtype=torch.float64, device=device)
        self._ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self._before = torch.zeros_like(self._ids)

    def seek(self, distances: Tensor, ids: Tensor) -> None:
        """In a first pass: take a block of references, those of other classes at infinite distances."""
        nearest = distances.amin(1, keepdim=True)
        # Of equal ones the first: an argmin may be any of them.
        first = ids.where(distances == nearest, torch.iinfo(torch.int64).max).amin(1, keepdim=True)
        is_new = nearest < self._distances
        self._ids = first.where(is_new, self._ids)
        self._distances = nearest.where(is_new, self._distances)

    def count(self, distances: Tensor, ids: Tensor) -> None:
        """In a second pass: count those of a block that are nearer, or as near and of a lower number."""
        as_near = (distances == self._distances) & (ids < self._ids)
        self._before += ((distances < self._distances) | as_near).sum(1, keepdim=True)

    def ranks(self) -> Tensor:
        """Their places among all references, from 1; 0 where there is none."""
        return (self._before + 1).where(self._distances.isfinite(), 0).squeeze(1)
