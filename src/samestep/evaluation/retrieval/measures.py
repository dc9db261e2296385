"""Retrieval metrics of embeddings: for users to call, and for a run's evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.config.evaluation import CLUSTERING_METRICS, RETRIEVAL_METRICS, Distance, unknown_metrics
from samestep.distributed.collectives import SoloCollectives
from samestep.distributed.health.activity import Activity
from samestep.errors import TaskError
from samestep.evaluation.retrieval.clusters import KMeans
from samestep.evaluation.retrieval.scores import NeighbourScores
from samestep.evaluation.retrieval.search import GROUP_BYTES, QUERY_BLOCK, REFERENCE_BLOCK, Search, SharedRows, prepared
from samestep.reduce.row_shards import RowExchange, ShardPlan


def normalized_mutual_information(left: Tensor, right: Tensor) -> float:
    """NMI: 1 if both partitions are one, 0 if neither says anything of the other."""
    table = _contingency(left, right)
    if 1 in table.shape and table.shape[0] == table.shape[1]:
        return 1.0
    found = _mutual_information(table)
    return found / _mean_entropy(table) if found > 0 else 0.0


def adjusted_mutual_information(left: Tensor, right: Tensor) -> float:
    """AMI: NMI less what partitions of these sizes have in common by chance."""
    table = _contingency(left, right)
    if table.shape[0] == table.shape[1] and table.shape[0] in (1, int(table.sum())):
        return 1.0
    expected = _expected_information(table.sum(1), table.sum(0))
    beyond = _mean_entropy(table) - expected
    smallest = torch.finfo(torch.float64).eps
    beyond = min(beyond, -smallest) if beyond < 0 else max(beyond, smallest)
    return (_mutual_information(table) - expected) / beyond


def _contingency(left: Tensor, right: Tensor) -> Tensor:
    """Return how many samples are in each part of one and each part of the other."""
    rows, columns = left.unique(return_inverse=True)[1], right.unique(return_inverse=True)[1]
    shape = int(rows.max()) + 1, int(columns.max()) + 1
    flat = torch.bincount(rows * shape[1] + columns, minlength=shape[0] * shape[1])
    return flat.view(shape).double()


def _mutual_information(table: Tensor) -> float:
    whole = table.sum()
    by_chance = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / whole
    terms = torch.xlogy(table / whole, table / by_chance)
    return max(0.0, math.fsum(terms[table > 0].tolist()))


def _mean_entropy(table: Tensor) -> float:
    shares = [table.sum(axis) / table.sum() for axis in (0, 1)]
    return sum(-math.fsum(torch.xlogy(share, share).tolist()) for share in shares) / 2


def _expected_information(rows: Tensor, columns: Tensor) -> float:
    """Return the mutual information of random partitions whose parts have these sizes (hypergeometric)."""
    whole = int(rows.sum())
    # Of 0! to N!: each pair of sizes takes rows of it.
    logs = torch.lgamma(torch.arange(1, whole + 2, dtype=torch.float64))
    terms = []
    # Parts of one size have one term.
    for row, row_count in _sizes(rows):
        for column, column_count in _sizes(columns):
            neither = whole - row - column
            least, most = max(1, -neither), min(row, column)
            both = torch.arange(least, most + 1, dtype=torch.float64)
            likelihood = (
                logs[row] + logs[column] + logs[whole - row] + logs[whole - column] - logs[whole]
                - logs[least : most + 1]
                - logs[row - most : row - least + 1].flip(0)
                - logs[column - most : column - least + 1].flip(0)
                - logs[neither + least : neither + most + 1]
            ).exp()  # fmt: skip
            information = both / whole * (whole * both / (row * column)).log()
            terms.append(float((likelihood * information).sum()) * row_count * column_count)
    return math.fsum(terms)


def _sizes(parts: Tensor) -> list[tuple[int, int]]:
    """Return the sizes that parts have, and how many have each."""
    sizes, counts = torch.unique(parts.long(), return_counts=True)
    return list(zip(sizes.tolist(), counts.tolist(), strict=True))


def measure(
    queries: Tensor,
    labels: Tensor,
    references: Tensor | None = None,
    reference_labels: Tensor | None = None,
    metrics: Sequence[str] = RETRIEVAL_METRICS,
    distance: Distance = "cosine",
    seed: int = 0,
) -> dict[str, float]:
    """Retrieval metrics of embeddings that this process has; `run.retrieval` is for those of all ranks.

    Args:
        queries: An embedding in each row.
        labels: A whole number for each query: its class.
        references: Where neighbours are sought; among the queries, each without itself, unless given.
        reference_labels: A class for each reference.
        metrics: Their names: `precision_at_K`, `recall_at_K` (with any number), `r_precision`,
            `mean_average_precision_at_r`, `mean_reciprocal_rank`, `nmi`, `ami`.
        distance: cosine or euclidean.
        seed: Of the clusters of `nmi` and `ami`.

    Returns:
        The metrics, by name.

    Example:
        >>> samestep.retrieval.measure(valid_z, valid_y, train_z, train_y)["precision_at_1"]
    """
    exchange = RowExchange(SoloCollectives(Activity()))
    shared = [_alone(queries, labels, QUERY_BLOCK, "queries")]
    if references is not None:
        if reference_labels is None:
            raise TaskError("retrieval got references without reference_labels: give a class for each")
        shared.append(_alone(references, reference_labels, REFERENCE_BLOCK, "references"))
    return measure_shared(
        exchange, shared[0], shared[1] if len(shared) > 1 else None, metrics, distance, queries.device, seed
    )


def _alone(rows: Tensor, labels: Tensor, block: int, what: str) -> SharedRows:
    refuse_odd_rows(rows, what)
    if not len(rows):
        raise TaskError(f"retrieval got no {what}: there are 0 rows")
    found = checked_labels(labels, len(rows), f"the {what}")
    return SharedRows(ShardPlan(len(rows), block, 1), rows.detach().float().cpu(), found)


def refuse_unknown(metrics: Sequence[str]) -> None:
    """Raise unless these are names of retrieval metrics."""
    wrong = unknown_metrics(metrics)
    if wrong:
        raise TaskError(f"metrics of retrieval: {wrong}")


def refuse_odd_rows(rows: object, what: str) -> None:
    """Raise unless these are embeddings: a tensor of floats with a row for each sample."""
    if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.is_floating_point():
        found = type(rows).__name__
        if isinstance(rows, Tensor):
            found = f"{str(rows.dtype).removeprefix('torch.')} {tuple(rows.shape)}"
        raise TaskError(f"embeddings have a row of floats for each sample, (samples, size), and {what} is {found}")


def checked_labels(labels: object, samples: int, what: str) -> Tensor:
    """Classes as int64 in host memory.

    Raises:
        TaskError: There is not one whole number for each sample.
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        found = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TaskError(
            f"retrieval needs of {what} a whole number for each sample, its class, as a tensor, and got {found}"
        )
    if labels.shape != (samples,):
        raise TaskError(
            f"retrieval needs of {what} one class for each of {samples} samples, and got the shape "
            f"{tuple(labels.shape)}"
        )
    return labels.detach().cpu().long()


def measure_shared(
    exchange: RowExchange,
    queries: SharedRows,
    references: SharedRows | None,
    metrics: Sequence[str],
    distance: Distance,
    device: torch.device,
    seed: int,
) -> dict[str, float]:
    """Retrieval metrics of rows that are on all ranks; every rank calls this, and gets the same.

    Args:
        queries: In blocks of `QUERY_BLOCK`.
        references: In blocks of `REFERENCE_BLOCK`; the queries themselves if None.

    Raises:
        TaskError: The labels or the names of metrics make no sense.
    """
    refuse_unknown(metrics)
    sizes = [rows.rows.shape[1] for rows in (queries, references) if rows is not None]
    if len(set(sizes)) > 1:
        raise TaskError(f"queries have embeddings of {sizes[0]} numbers, references of {sizes[1]}")
    finite = all(bool(s.rows.isfinite().all()) for s in (queries, references) if s is not None)
    search = Search(exchange, queries, references, distance, device)
    scores = NeighbourScores(search, queries, metrics)
    if not all(exchange.collectives.gather(finite)):
        return dict.fromkeys(metrics, float("nan"))
    found = scores.measure()
    if any(name in CLUSTERING_METRICS for name in metrics):
        found |= _clustering(exchange, queries, distance, seed)
    return {name: found[name] for name in metrics}


def _clustering(exchange: RowExchange, queries: SharedRows, distance: Distance, seed: int) -> dict[str, float]:
    """Return how well clusters of the queries, as many as classes, agree with the classes."""
    rows = [prepared(part, QUERY_BLOCK, distance)[: len(part)].float() for part in queries.rows.split(QUERY_BLOCK)]
    shared = SharedRows(queries.plan, torch.cat(rows) if rows else queries.rows, queries.labels)
    clusters = KMeans(exchange, shared, seed).clusters(len(queries.labels.unique()))
    return {
        "nmi": normalized_mutual_information(queries.labels, clusters),
        "ami": adjusted_mutual_information(queries.labels, clusters),
    }


def memory_needed(queries: int, references: int, sizes: Sequence[int], world: int, item: int = 4) -> int:
    """About how many bytes of a rank's memory a retrieval takes.

    Args:
        sizes: Of each view, how many numbers an embedding has.
    """
    rows = -(-(queries + references) // world)
    # Twice, while rows go to the ranks that hold them; labels are on every rank.
    held = 2 * rows * item * sum(sizes) + 16 * (queries + references)
    blocks = 8 * (4 * QUERY_BLOCK * REFERENCE_BLOCK + 3 * REFERENCE_BLOCK * max(sizes))
    return held + blocks + 2 * GROUP_BYTES
