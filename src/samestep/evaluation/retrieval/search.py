"""The nearest of many references for each of many queries, exactly, the same at any number of ranks.

Queries and references meet block by block: every matrix of distances has the same samples and the same
shape whatever the number of ranks, so that it has the same bits. Distances are of float64. Equal ones are
ordered by the references' numbers.

Most pairs are far apart, and a product in float32 shows it: with its error allowed for, it leaves out those
that cannot be among the nearest, and the exact distance is computed for the others only.
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
_PAIRS = 512
"""Whose exact distances are computed at once."""
_TILE = 32
"""Distances of which the least is looked at first."""
_SPARE = 32
"""Candidates beyond 2 k that are kept before they are sorted."""


@dataclass(frozen=True)
class SharedRows:
    """Embeddings of a dataset, each on one rank, and all their labels."""

    plan: ShardPlan
    rows: Tensor
    """This rank's, of float32 or float16, in host memory."""
    labels: Tensor
    """Labels of all samples, as int64 in host memory, on every rank."""


@dataclass(frozen=True)
class QueryBlock:
    """Some queries, on the device."""

    number: int
    ids: range
    rows: Tensor
    """As `prepared` made them."""
    rough: Rough


@dataclass(frozen=True)
class Rough:
    """A block of rows in float32, and what a product of them may be off by."""

    rows: Tensor
    squares: Tensor
    """The rows' squared lengths, for euclidean distances."""
    largest: float
    """Largest of the squares."""

    @classmethod
    def of(cls, rows: Tensor) -> Rough:
        """Return a rough copy of rows as `prepared` made them."""
        squares = (rows**2).sum(1)
        return cls(rows.float(), squares.float(), float(squares.max()))

    def error(self, other: Rough) -> float:
        """Return what a squared distance to another block's rows, or twice a product, is off by at most.

        A product of n numbers is off by at most n roundings of the lengths' product; so are the rows and
        squares themselves, by a few.
        """
        return (self.rows.shape[1] + 16) * 2.0**-22 * max(self.largest + other.largest, 1e-30)


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
        queries: In blocks of `QUERY_BLOCK`.
        references: In blocks of `REFERENCE_BLOCK`.
        """
        self.exchange, self._queries, self._distance = exchange, queries, distance
        # No other kind of device has float64 everywhere.
        self._device = device if device.type == "cuda" else torch.device("cpu")
        self.excludes_itself = references is None
        """Whether a query is among the references, and no neighbour of itself."""
        self.references = queries_again(exchange, queries) if references is None else references
        self._products = torch.empty(QUERY_BLOCK, REFERENCE_BLOCK, device=self._device)

    def nearest(self, k: int) -> Iterator[tuple[QueryBlock, Tensor, Tensor]]:
        """This rank's blocks, with distances and numbers of each query's k nearest references.

        Where there are fewer, distances are infinite and numbers -1.
        """
        at_once = max(1, GROUP_BYTES // (QUERY_BLOCK * bytes_of_query(k, self.size)))
        for group in self._groups(range(self._queries.plan.blocks), at_once):
            found = [_Candidates(k) for _ in group]
            for number, block in self._reference_blocks():
                there = Rough.of(block)
                for query, candidates in zip(group, found, strict=True):
                    rough = self._rough_distances(query, there, number)
                    candidates.add(rough, query.rough.error(there), number * REFERENCE_BLOCK)
            exact = [_Exact(candidates.numbers()) for candidates in found]
            for number, block in self._reference_blocks():
                for query, pairs in zip(group, exact, strict=True):
                    rows, columns = pairs.within(number)
                    pairs.put(self._distances_of(query.rows[rows], block[columns]))
            for query, pairs in zip(group, exact, strict=True):
                yield query, *pairs.nearest(k)

    def first_matches(self, numbers: Sequence[int]) -> Iterator[tuple[QueryBlock, Tensor]]:
        """Blocks of queries, with the rank of each one's nearest reference of its own class, from 1.

        It is 0 for queries of which no reference is of the same class.
        """
        at_once = max(1, GROUP_BYTES // (QUERY_BLOCK * bytes_of_query(1, self.size)))
        for group in self._groups(numbers, at_once):
            found = [_FirstMatch(self._device) for _ in group]
            for number, block in self._reference_blocks():
                for query, first in zip(group, found, strict=True):
                    distances, same = (self.distances(query, block, number), self._same(query, number))
                    first.seek(distances.masked_fill_(~same, torch.inf), self._ids(number))
            for number, block in self._reference_blocks():
                for query, first in zip(group, found, strict=True):
                    first.count(self.distances(query, block, number), self._ids(number))
            for query, first in zip(group, found, strict=True):
                yield query, first.ranks()[: len(query.ids)].cpu()

    @property
    def size(self) -> int:
        """Return how many numbers an embedding has."""
        return self._queries.rows.shape[1]

    def distances(self, query: QueryBlock, block: Tensor, number: int) -> Tensor:
        """Return the distances of a block of queries to a block of references; infinite where there is no pair.

        Args:
            block: The references, as `prepared` made them.
        """
        products = query.rows @ block.T
        if self._distance == "cosine":
            found = products.neg_().add_(1)
        else:
            squares = (query.rows**2).sum(1, keepdim=True) + (block**2).sum(1)
            found = squares.sub_(products, alpha=2).clamp_min_(0)
        return self._without_pairs(found, query, number)

    def _without_pairs(self, found: Tensor, query: QueryBlock, number: int) -> Tensor:
        """Distances that are infinite where there is no reference, or it is the query itself."""
        held = self.references.plan.rows_in(number)
        found[:, len(held) :] = torch.inf
        found[len(query.ids) :] = torch.inf
        if self.excludes_itself:
            first, last = max(query.ids.start, held.start), min(query.ids.stop, held.stop)
            both = torch.arange(first, max(first, last), device=found.device)
            found[both - query.ids.start, both - held.start] = torch.inf
        return found

    def _rough_distances(self, query: QueryBlock, there: Rough, number: int) -> Tensor:
        """Like `distances`, in float32 and in one buffer for all blocks."""
        if self._distance == "cosine":
            first, factor = query.rough.squares.new_ones(1, 1), -1
        else:
            first, factor = query.rough.squares[:, None] + there.squares, -2
        found = torch.addmm(first, query.rough.rows, there.rows.T, alpha=factor, out=self._products)
        return self._without_pairs(found, query, number)

    def _distances_of(self, queries: Tensor, references: Tensor) -> Tensor:
        """Distances of pairs, whose bits depend on nothing but the pair: always as many at once."""
        found = queries.new_empty(len(queries))
        for start in range(0, len(queries), _PAIRS):
            some = slice(start, start + _PAIRS)
            mine, theirs = queries[some], references[some]
            terms = mine * theirs if self._distance == "cosine" else (mine - theirs).square_()
            if len(terms) < _PAIRS:
                terms = torch.nn.functional.pad(terms, (0, 0, 0, _PAIRS - len(terms)))
            found[some] = terms.sum(1)[: len(mine)]
        return found.neg_().add_(1) if self._distance == "cosine" else found

    def _same(self, query: QueryBlock, number: int) -> Tensor:
        """Return which pairs of a block of queries and one of references have the same label."""
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
        by_rank = [[number for number in numbers if number in plan.blocks_of(other)] for other in range(plan.world)]
        passes = -(-max(map(len, by_rank)) // at_once)
        for start in range(0, passes * at_once, at_once):
            yield [self._query_block(number) for number in by_rank[rank][start : start + at_once]]

    def _query_block(self, number: int) -> QueryBlock:
        ids = self._queries.plan.rows_in(number)
        first = self._queries.plan.rows_of(self.exchange.collectives.rank).start
        rows = self._queries.rows[ids.start - first : ids.stop - first].to(self._device)
        whole = prepared(rows, QUERY_BLOCK, self._distance)
        return QueryBlock(number, ids, whole, Rough.of(whole))

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
    return 20 * (2 * k + _SPARE) + 12 * size


def _below(values: Tensor, limit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where values are below their row's limit, row by row, and the values there.

    By the least of each tile first: few are, and a minimum costs a tenth of a comparison and its search.
    """
    tiles = values.view(len(values), -1, _TILE)
    rows, numbers = (tiles.amin(2) < limit).nonzero(as_tuple=True)
    picked = tiles[rows, numbers]
    at, within = (picked < limit[rows]).nonzero(as_tuple=True)
    return rows[at], numbers[at] * _TILE + within, picked[at, within]


def _kth(values: Tensor, k: int) -> Tensor:
    """Return what at least k values of each row are no more than: near the k-th, and cheaper than it."""
    tile = max((size for size in (16, 8, 4, 2) if values.shape[1] // size >= 2 * k), default=1)
    least = values.view(len(values), -1, tile).amin(2)
    return least.topk(k, dim=1, largest=False, sorted=False).values.amax(1, keepdim=True)


class _Candidates:
    """The references that may be among the k nearest of a block of queries, of those that have passed so far."""

    def __init__(self, k: int) -> None:
        self._k, self._width, self._error = k, 0, 0.0
        self._distances: list[Tensor] = []
        self._ids: list[Tensor] = []
        self._limit: Tensor | None = None
        """Per query, the distance from which on a reference cannot be among the nearest."""

    def add(self, rough: Tensor, error: float, start: int) -> None:
        """Take a block of references.

        Args:
            rough: Distances that are off by no more than `error`; infinite where there is no pair.
            error: How much that is.
            start: The number of the block's first reference.
        """
        self._error = max(self._error, error)
        limit = self._limit
        if limit is None:
            limit = _kth(rough, min(self._k, rough.shape[1])) + 2 * self._error
        rows, columns, nearer = _below(rough, limit)
        counts = torch.bincount(rows, minlength=len(rough))
        most = int(counts.max())
        if most or self._limit is None:
            places = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
            found = rough.new_full((len(rough), most), torch.inf)
            found[rows, places] = nearer
            ids = torch.full_like(found, -1, dtype=torch.int64)
            ids[rows, places] = columns + start
            self._distances.append(found)
            self._ids.append(ids)
            self._width += most
        if self._limit is None or self._width > 2 * self._k + _SPARE:
            self._sort()

    def _sort(self) -> None:
        """Keep those that may be among the k nearest: all that are not certainly farther than the k-th."""
        distances, order = torch.cat(self._distances, 1).sort(dim=1)
        limit = distances.new_full((len(distances), 1), torch.inf)
        if distances.shape[1] >= self._k:
            limit = distances[:, self._k - 1 : self._k] + 2 * self._error
        width = int((distances < limit).sum(1).max()) if distances.numel() else 0
        ids = torch.cat(self._ids, 1).gather(1, order[:, :width])
        # A copy: a part of a tensor keeps the whole of it.
        self._distances, self._ids = [distances[:, :width].clone()], [ids]
        self._width, self._limit = width, limit

    def numbers(self) -> Tensor:
        """Their numbers, in their order; -1 where a query has fewer than others."""
        self._sort()
        return self._ids[0].sort(dim=1).values


class _Exact:
    """Exact distances of the pairs that are left, filled in block by block."""

    def __init__(self, ids: Tensor) -> None:
        self._ids = ids
        self._distances = torch.full(ids.shape, torch.inf, dtype=torch.float64, device=ids.device)
        self._where: tuple[Tensor, ...] = ()

    def within(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the pairs with a block of references: rows of queries, and of the block."""
        start = number * REFERENCE_BLOCK
        inside = (self._ids >= start) & (self._ids < start + REFERENCE_BLOCK)
        self._where = inside.nonzero(as_tuple=True)
        return self._where[0], self._ids[self._where] - start

    def put(self, distances: Tensor) -> None:
        """Take the distances of the pairs that `within` has named last."""
        self._distances[self._where] = distances

    def nearest(self, k: int) -> tuple[Tensor, Tensor]:
        """Distances and numbers of the k nearest, nearest first; of equal ones the lower number."""
        distances, order = self._distances.sort(dim=1, stable=True)
        distances, ids = distances[:, :k], self._ids.gather(1, order)[:, :k]
        missing = k - distances.shape[1]
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
        """Take, in a first pass, a block of references, those of other classes at infinite distances."""
        nearest = distances.amin(1, keepdim=True)
        # Of equal ones the first: an argmin may be any of them.
        first = ids.where(distances == nearest, torch.iinfo(torch.int64).max).amin(1, keepdim=True)
        is_new = nearest < self._distances
        self._ids = first.where(is_new, self._ids)
        self._distances = nearest.where(is_new, self._distances)

    def count(self, distances: Tensor, ids: Tensor) -> None:
        """Count, in a second pass, those of a block that are nearer, or as near and of a lower number."""
        as_near = (distances == self._distances) & (ids < self._ids)
        self._before += ((distances < self._distances) | as_near).sum(1, keepdim=True)

    def ranks(self) -> Tensor:
        """Their places among all references, from 1; 0 where there is none."""
        return (self._before + 1).where(self._distances.isfinite(), 0).squeeze(1)
