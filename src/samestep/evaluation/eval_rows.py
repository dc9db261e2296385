"""The outputs of a model for each sample of a dataset: computed once, on one of the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samestep.config.evaluation import Distance, RowType
from samestep.data.batch import Collate, LaneBatch, Moment
from samestep.data.sequential import SequentialSource
from samestep.errors import TaskError
from samestep.evaluation.eval_batches import evaluation_batches, evaluation_setup
from samestep.evaluation.eval_mode import BufferSnapshot, evaluating, refuse_changed
from samestep.evaluation.retrieval.measures import (
    checked_labels,
    measure_shared,
    memory_needed,
    refuse_odd_rows,
    refuse_unknown,
)
from samestep.evaluation.retrieval.search import QUERY_BLOCK, REFERENCE_BLOCK, SharedRows
from samestep.reduce.row_shards import RowExchange, ShardPlan
from samestep.run_setup import RunSetup

Embed = Callable[[LaneBatch], Any]
"""Gives the embeddings of a batch: a tensor, or several by the names of views."""
Labels = Callable[[LaneBatch], Any]
"""Gives the class of each sample of a batch."""
ONLY_VIEW = "embedding"
"""The name of a view that has none."""
_WORTH_A_LINE = 1 << 30


@dataclass
class RetrievalRequest:
    """Settings of a retrieval evaluation; the same one for all evaluations of a run."""

    metrics: Sequence[str]
    views: Sequence[str] | None
    """Their names; None for all."""
    distance: Distance
    keep_in: RowType = "float32"
    was_announced: bool = False
    """Whether the memory that it takes has been printed."""

    def __post_init__(self) -> None:
        refuse_unknown(self.metrics)  # before anything is embedded


@dataclass
class _Embedded:
    """This rank's part of a dataset, batch by batch."""

    samples: int
    ids: list[int] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    rows: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, batch: LaneBatch, views: Mapping[str, Tensor], labels: Tensor) -> None:
        if self.rows and self.rows.keys() != views.keys():
            raise TaskError(
                f"embeddings had the views {', '.join(self.rows)}, and now {', '.join(views)}: return the "
                "same ones for every batch"
            )
        self.ids += batch.ids
        self.labels.append(labels)
        for name, rows in views.items():
            self.rows.setdefault(name, []).append(rows)

    def sizes(self) -> dict[str, int]:
        """Return how many numbers an embedding has, by view; empty on a rank without samples."""
        return {name: rows[0].shape[1] for name, rows in self.rows.items()}


class RetrievalEvaluator:
    """Embeds queries and references with a run's modules, and measures how they find each other."""

    def __init__(self, setup: RunSetup, modules: Sequence[nn.Module], moment: Moment) -> None:
        self._setup, self._modules, self._moment = evaluation_setup(setup), modules, moment
        self._exchange = RowExchange(setup.context.collectives)

    def run(
        self,
        queries: Any,
        references: Any | None,
        embed: Embed,
        labels: Labels,
        collate: Collate | None,
        request: RetrievalRequest,
    ) -> dict[str, float]:
        """Return the metrics of all views; the same numbers on every rank and any world.

        Args:
            references: Another one; None or the same if neighbours are sought among the queries.
        """
        buffers = BufferSnapshot(self._modules)
        others = None if references is queries else references
        named = {"validation data": queries, "reference data": others}
        # Opened first: an empty set is refused before the other one is embedded.
        sources = {
            what: SequentialSource(self._setup, data, what, collate) for what, data in named.items() if data is not None
        }
        counts = [source.plan.samples for source in sources.values()]
        embedded = [
            self._embed(what, source, embed, labels, request, (counts[0], counts[-1]))
            for what, source in sources.items()
        ]
        refuse_changed(self._setup.context.gather(buffers.changed()), "the evaluation")
        sizes = self._same_sizes([part.sizes() for part in embedded])
        found: dict[str, float] = {}
        every_label = [self._all_labels(part) for part in embedded]
        for number, view in enumerate(request.views or sizes):
            shared = [
                self._share(part, view, (sizes[view], request.keep_in), block, known)
                for part, block, known in zip(embedded, (QUERY_BLOCK, REFERENCE_BLOCK), every_label, strict=False)
            ]
            values = measure_shared(
                self._exchange, shared[0], shared[1] if len(shared) > 1 else None, request.metrics,
                request.distance, self._setup.context.device, self._setup.config.seed,
            )  # fmt: skip
            # The first view is the one that a run is judged by.
            found |= {f"{view}/{name}" if number else name: v for name, v in values.items()}
        if any(map(math.isnan, found.values())):
            self._setup.context.log.warn(
                f"retrieval at step {self._moment.step} gave NaN: embeddings are not all finite"
            )
        return found

    def _embed(
        self,
        what: str,
        source: SequentialSource,
        embed: Embed,
        labels: Labels,
        request: RetrievalRequest,
        counts: tuple[int, int],
    ) -> _Embedded:
        """This rank's part of a dataset."""
        setup, part = self._setup, _Embedded(source.plan.samples)
        with evaluating(self._modules), torch.no_grad():
            for batch in evaluation_batches(setup, source, self._moment, what):
                with setup.precision.forward():
                    views = views_of(embed(batch), request.views, len(batch))
                views = {name: _kept(rows, name, request.keep_in) for name, rows in views.items()}
                if not request.was_announced:
                    request.was_announced = True
                    self._announce(counts, views.values())
                part.add(batch, views, checked_labels(labels(batch), len(batch), what))
        return part

    def _announce(self, counts: tuple[int, int], views: Collection[Tensor]) -> None:
        """Print what it takes, if that is much."""
        context, sizes = self._setup.context, [view.shape[1] for view in views]
        needed = memory_needed(*counts, sizes, context.world, max(v.itemsize for v in views))
        if needed > _WORTH_A_LINE:
            context.log.main(
                f"Retrieval of {counts[0]:,} queries among {counts[1]:,} references, embeddings of "
                f"{' and '.join(map(str, sizes))} numbers: at most about {needed / 2**30:.1f} GiB of host "
                "memory on each rank"
            )

    def _same_sizes(self, mine: list[dict[str, int]]) -> dict[str, int]:
        """Return the views with their sizes, which all ranks and both sets must have in common."""
        every = [sizes for parts in self._setup.context.gather(mine) for sizes in parts if sizes]
        other = next((sizes for sizes in every if sizes != every[0]), None)
        if other is not None:
            raise TaskError(
                f"embeddings must have the same views and sizes for all samples: they have {every[0]} and {other}"
            )
        return every[0]

    def _all_labels(self, part: _Embedded) -> Tensor:
        mine = torch.cat(part.labels) if part.labels else torch.zeros(0, dtype=torch.int64)
        every = torch.zeros(part.samples, dtype=torch.int64)
        for ids, labels in self._setup.context.gather((torch.tensor(part.ids).long(), mine)):
            every[ids] = labels
        return every

    def _share(self, part: _Embedded, view: str, kind: tuple[int, RowType], block: int, labels: Tensor) -> SharedRows:
        plan = ShardPlan(part.samples, block, self._setup.context.world)
        # Taken out: rows are held once only while they go to other ranks.
        mine = part.rows.pop(view, [])
        rows = torch.cat(mine) if mine else torch.zeros(0, kind[0], dtype=getattr(torch, kind[1]))
        return SharedRows(plan, self._exchange.settle(plan, part.ids, rows), labels)


def _kept(rows: Tensor, view: str, kind: RowType) -> Tensor:
    """Embeddings as they are kept until they are compared."""
    kept = rows.to(getattr(torch, kind))
    if kept.isinf().sum() > rows.isinf().sum():
        raise TaskError(
            f"the view {view} has embeddings with numbers up to {rows.abs().max().item():.4g}, and "
            f"evaluation.keep_in is {kind}, which ends at {torch.finfo(kept.dtype).max:.4g}: set float32, "
            "or normalize them"
        )
    return kept


def views_of(given: Any, wanted: Sequence[str] | None, samples: int) -> dict[str, Tensor]:
    """Return the wanted embeddings of a batch by view, of float32, in host memory.

    Args:
        given: What `eval_embed` returned.
        wanted: Names of views; None for all.
        samples: How many the batch has.

    Raises:
        TaskError: There is no such view, or not a row for each sample.
    """
    named = dict(given) if isinstance(given, Mapping) else {ONLY_VIEW: given}
    unknown = [name for name in wanted or () if name not in named]
    if unknown:
        raise TaskError(
            f"there is no view {', '.join(unknown)}: eval_embed returns {', '.join(map(str, named))}"
            + ("" if isinstance(given, Mapping) else ", as a tensor is called; return several by name")
        )
    found = {}
    for name in wanted or named:
        refuse_odd_rows(named[name], f"the view {name} of eval_embed")
        if len(named[name]) != samples:
            raise TaskError(f"the view {name} has {len(named[name])} rows for {samples} samples: return one for each")
        found[name] = named[name].detach().float().cpu()
    return found
