"""How well embeddings find their like: what users call, and what a run's evaluation does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.config.evaluation import (
    CLUSTERING_METRICS,
    RETRIEVAL_METRICS,
    Distance,
    unknown_metrics,
)
from samestep.distributed.collectives import SoloCollectives
from samestep.distributed.health.activity import Activity
from samestep.errors import TaskError
from samestep.reduce.row_shards import RowExchange, ShardPlan
from samestep.retrieval.clusters import KMeans
from samestep.retrieval.mutual_information import (
    adjusted_mutual_information,
    normalized_mutual_information,
)
from samestep.retrieval.scores import NeighbourScores
from samestep.retrieval.search import (
    GROUP_BYTES,
    QUERY_BLOCK,
    REFERENCE_BLOCK,
    Search,
    SharedRows,
    prepared,
)


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
            raise TaskError(
                "retrieval got references without reference_labels: give a class for each"
            )
        shared.append(_alone(references, reference_labels, REFERENCE_BLOCK, "references"))
    return measure_shared(
        exchange, shared[0], shared[1] if len(shared) > 1 else None, metrics, distance,
        queries.device, seed,
    )  # fmt: skip


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
        raise TaskError(
            f"embeddings have a row of floats for each sample, (samples, size), and {what} is {found}"
        )


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
        exchange: Between ranks.
        queries: In blocks of `QUERY_BLOCK`.
        references: In blocks of `REFERENCE_BLOCK`; the queries themselves if None.
        metrics: Their names.
        distance: Between embeddings.
        device: Where distances are computed.
        seed: Of the clusters of `nmi` and `ami`.

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


def _clustering(
    exchange: RowExchange, queries: SharedRows, distance: Distance, seed: int
) -> dict[str, float]:
    """How well clusters of the queries, as many as classes, agree with the classes."""
    rows = [
        prepared(part, QUERY_BLOCK, distance)[: len(part)].float()
        for part in queries.rows.split(QUERY_BLOCK)
    ]
    shared = SharedRows(queries.plan, torch.cat(rows) if rows else queries.rows, queries.labels)
    clusters = KMeans(exchange, shared, seed).clusters(len(queries.labels.unique()))
    return {
        "nmi": normalized_mutual_information(queries.labels, clusters),
        "ami": adjusted_mutual_information(queries.labels, clusters),
    }


def memory_needed(
    queries: int, references: int, sizes: Sequence[int], world: int, item: int = 4
) -> int:
    """About how many bytes of a rank's memory a retrieval takes.

    Args:
        queries: How many there are.
        references: How many there are.
        sizes: Of each view, how many numbers an embedding has.
        world: The number of ranks.
        item: How many bytes a number has.
    """
    rows = -(-(queries + references) // world)
    # Twice, while rows go to the ranks that hold them; labels are on every rank.
    held = 2 * rows * item * sum(sizes) + 16 * (queries + references)
    blocks = 8 * (4 * QUERY_BLOCK * REFERENCE_BLOCK + 3 * REFERENCE_BLOCK * max(sizes))
    return held + blocks + 2 * GROUP_BYTES
