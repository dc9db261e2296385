"""The section on evaluations: when, how, and what retrieval measures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from samestep.config.bounds import MOST_ENTRIES, Epochs, Samples, Steps
from samestep.config.launch import Line, Meaning
from samestep.config.optim import Section
from samestep.errors import Mistake

Distance = Literal["cosine", "euclidean"]
RowType = Literal["float32", "float16"]

RETRIEVAL_METRICS = ("precision_at_1", "r_precision", "mean_average_precision_at_r", "mean_reciprocal_rank")
"""What retrieval measures unless set otherwise."""
CLUSTERING_METRICS = ("nmi", "ami")
_AT_K = re.compile(r"(precision|recall)_at_([1-9][0-9]{0,5})")

ViewName = Annotated[
    str, Field(pattern=r"^[^/\s\x00-\x1f\x7f-\x9f]{1,100}$"), Meaning("at most 100 characters without spaces and /")
]


def at_k(metric: str) -> tuple[str, int] | None:
    """Return what `precision_at_5` or `recall_at_5` measures, and its k; None for other names."""
    found = _AT_K.fullmatch(metric)
    return None if found is None else (found[1], int(found[2]))


def unknown_metrics(metrics: Sequence[str]) -> str:
    """Return what is wrong with the names of retrieval metrics; empty if nothing is."""
    known = (*RETRIEVAL_METRICS, *CLUSTERING_METRICS)
    unknown = [name for name in metrics if name not in known and at_k(name) is None]
    if unknown:
        return (
            f"{', '.join(unknown)} cannot be measured: there are {', '.join(known)}, and with any "
            "number precision_at_K and recall_at_K"
        )
    if not metrics:
        return "it is empty: name at least one metric"
    twice = [name for name in dict.fromkeys(metrics) if list(metrics).count(name) > 1]
    return f"{', '.join(twice)} is there twice" if twice else ""


class EvaluationConfig(Section):
    """Settings of evaluations on the validation set."""

    mode: Literal["sharded", "rank0", "gather", "retrieval"] = Field(
        "sharded",
        description="lanes over all ranks, or all lanes on rank 0, with the same result; gather: the task's "
        "evaluate_gathered, once; retrieval: nearest neighbours of embeddings",
    )
    every_epochs: Epochs | None = Field(1, description="evaluate after every n epochs")
    every_steps: Steps | None = Field(None, description="evaluate after every n steps")
    batch: Samples | None = Field(None, description="samples per lane batch; as in training if not set")
    reference: Line = Field(
        "train",
        description="in which set neighbours are sought: train, valid, or a name that the task's reference_data knows",
    )
    views: tuple[ViewName, ...] | None = Field(
        None,
        min_length=1,
        max_length=MOST_ENTRIES,
        description="which embeddings of the task's eval_embed are measured; all if not set",
    )
    metrics: tuple[str, ...] | None = Field(
        None,
        max_length=MOST_ENTRIES,
        description=f"what retrieval measures; {', '.join(RETRIEVAL_METRICS)} if not set; also precision_at_K, "
        "recall_at_K, nmi, ami",
    )
    distance: Distance = Field("cosine", description="between embeddings")
    keep_in: RowType = Field(
        "float32", description="the type of embeddings in memory and between ranks; float16 halves both, and rounds"
    )

    @property
    def retrieval_metrics(self) -> tuple[str, ...]:
        """Return what retrieval measures."""
        return RETRIEVAL_METRICS if self.metrics is None else self.metrics

    def mistakes(self) -> list[Mistake]:
        """Return the contradictions within this section."""
        if self.mode != "retrieval":
            fields = type(self).model_fields
            return [
                Mistake(f"evaluation.{key}", f"is for mode: retrieval, and the mode is {self.mode}")
                for key in ("reference", "views", "metrics", "distance", "keep_in")
                if getattr(self, key) != fields[key].default
            ]
        wrong = unknown_metrics(self.retrieval_metrics)
        found = [Mistake("evaluation.metrics", wrong)] if wrong else []
        if self.views is not None and len(set(self.views)) < len(self.views):
            found.append(Mistake("evaluation.views", "a name is there twice"))
        return found
