"""The embeddings of a run's data, and which of them lie next to one of another class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Subset

from samestep.data.batch import LaneBatch
from samestep.distributed.context import RunContext
from samestep.errors import TaskError
from samestep.models.trained_model import Opened, dataset_of, open_trained, refuse_without_embeddings
from samestep.train.task import Task

_QUERIES_AT_ONCE = 512
NO_REFERENCE = "none"


@dataclass(frozen=True)
class EmbeddingRequest:
    """The embeddings to draw.

    Args:
        run: the run's directory.
        data: valid, train, or a name that the task's `predict_data` takes.
        reference: where each sample's nearest neighbour is sought: train, valid, a name that the task's
            `reference_data` takes, or none.
        view: which of the task's views; the first if None.
        points: how many samples are drawn, at most.
        which: the checkpoint: best, last or the number of a step.
        weights: raw, ema, swa or average.
        overrides: `section.key=value` texts for the run's config.
        trust: whether the task's code may run although it is not known to be this user's.
    """

    run: Path
    data: str = "valid"
    reference: str = "train"
    view: str | None = None
    points: int = 2000
    which: str = "best"
    weights: str = "raw"
    overrides: tuple[str, ...] = ()
    trust: bool = False


@dataclass(frozen=True)
class EmbeddedSet:
    """Embeddings and classes of some samples of a dataset; of unit length, if compared by the cosine."""

    dataset: Any
    indices: list[int]
    """Places of the samples in the dataset."""
    rows: Tensor
    labels: list[int] | None
    """The class of each; None if they have none."""
    view: str

    def name_of(self, place: int) -> str:
        """Return the file that a sample is from, where the dataset tells that as torchvision's do."""
        index = self.indices[place]
        samples = getattr(self.dataset, "samples", None)
        if isinstance(samples, Sequence) and isinstance(samples[index], (tuple, list)):
            return str(samples[index][0])
        return f"sample {index}"

    def class_names(self) -> list[str]:
        """Return the names of the classes that occur: the dataset's own, or their numbers."""
        known = getattr(self.dataset, "classes", None)
        names = [str(name) for name in known] if isinstance(known, (list, tuple)) else []
        most = max(self.labels or [0])
        return names + [str(number) for number in range(len(names), most + 1)]


class Neighbour(NamedTuple):
    """The nearest reference of a sample."""

    place: int
    distance: float


@dataclass(frozen=True)
class EmbeddedRun:
    """The embeddings that a page is drawn from."""

    drawn: EmbeddedSet
    references: EmbeddedSet | None
    nearest: list[Neighbour] | None
    """For each drawn sample."""
    distance: str
    """How near they are is measured by: cosine, or euclidean."""
    samples: int
    """Number of samples of the data, of which some are drawn."""
    step: int
    weights: str

    @property
    def wrong(self) -> list[bool] | None:
        """Return whether the nearest neighbour is of another class; None if that is not known."""
        if self.nearest is None or self.references is None:
            return None
        mine, others = self.drawn.labels, self.references.labels
        if mine is None or others is None:
            return None
        return [mine[at] != others[near.place] for at, near in enumerate(self.nearest)]


def embed_run(request: EmbeddingRequest, context: RunContext) -> EmbeddedRun | None:
    """Embed a run's data; every rank calls this, rank 0 gets the result.

    Args:
        request: what to embed.
        context: this process's place in the run.

    Raises:
        TaskError: if the task gives no embeddings, or none that can be drawn.
    """
    opened = open_trained(request.run, request.which, context, request.weights, None, request.overrides, request.trust)
    refuse_without_embeddings(opened.task)
    # The training set as it is for references: not augmented, and one view of each sample.
    find = _references if request.data == "train" else dataset_of
    dataset = find(opened.task, request.data)
    chosen = _evenly(len(dataset), request.points)
    drawn = _embedded(opened, dataset, chosen, request.data, request.view)
    references = None
    if request.reference != NO_REFERENCE:
        same = request.reference == request.data
        reference_set = dataset if same else _references(opened.task, request.reference)
        references = _embedded(opened, reference_set, range(len(reference_set)), request.reference, request.view)
    if drawn is None:
        return None
    distance = opened.setup.config.evaluation.distance
    nearest = None if references is None else _nearest(drawn, references, distance)
    return EmbeddedRun(
        drawn, references, nearest, distance, len(dataset), opened.trained.manifest.step, request.weights
    )


def _references(task: Task, name: str) -> Any:
    given = task.reference_data(name)
    return dataset_of(task, name) if given is None else given


def _evenly(samples: int, most: int) -> list[int]:
    """Indices spread over all samples: datasets are often sorted by class."""
    if samples <= most:
        return list(range(samples))
    return [number * samples // most for number in range(most)]


def _embedded(opened: Opened, dataset: Any, indices: Sequence[int], what: str, view: str | None) -> EmbeddedSet | None:
    """Return the embeddings of some samples, in one pass of all ranks; None on other ranks than rank 0."""

    def embed(batch: LaneBatch) -> tuple[str, Tensor, Tensor | None]:
        name, rows = next(iter(opened.embed(batch, view).items()))
        return name, rows, _labels(opened.task, batch)

    chosen = dataset if len(indices) == len(dataset) else Subset(dataset, list(indices))
    parts = list(opened.outputs(opened.source(chosen, f"data to embed ({what})"), embed))
    if not opened.setup.context.is_main:
        return None
    rows = torch.cat([rows for _, rows, _ in parts])
    if opened.setup.config.evaluation.distance == "cosine":
        rows = F.normalize(rows, dim=1)
    if not bool(torch.isfinite(rows).all()):
        raise TaskError(f"embeddings of {what} are not all finite: they cannot be drawn")
    labels = [number for _, _, given in parts if given is not None for number in given.tolist()]
    return EmbeddedSet(dataset, list(indices), rows, labels if len(labels) == len(rows) else None, parts[0][0])


def _labels(task: Task, batch: LaneBatch) -> Tensor | None:
    """Return the classes of a batch; None if it has none, as images of a plain folder."""
    pairs = isinstance(batch.data, (tuple, list)) and len(batch.data) > 1
    if type(task).labels is Task.labels and not pairs:
        return None
    labels = torch.as_tensor(task.labels(batch)).cpu()
    known = labels.dim() == 1 and not labels.is_floating_point() and bool((labels >= 0).all())
    return labels if known else None


def _nearest(drawn: EmbeddedSet, references: EmbeddedSet, distance: str) -> list[Neighbour]:
    """Return the nearest reference of each sample; no sample is its own neighbour."""
    found: list[Neighbour] = []
    for start in range(0, len(drawn.rows), _QUERIES_AT_ONCE):
        rows = drawn.rows[start : start + _QUERIES_AT_ONCE]
        if distance == "cosine":
            away = 1 - rows @ references.rows.T
        else:
            away = torch.cdist(rows, references.rows, compute_mode="donot_use_mm_for_euclid_dist")
        if drawn.dataset is references.dataset:
            own = torch.tensor(drawn.indices[start : start + _QUERIES_AT_ONCE])
            away[torch.arange(len(own)), own] = torch.inf
        least = away.min(1)
        found += map(Neighbour, least.indices.tolist(), least.values.tolist())
    return found


def as_array(rows: Tensor) -> np.ndarray[Any, Any]:
    """Embeddings for libraries that know no tensors."""
    array: np.ndarray[Any, Any] = rows.numpy()
    return array
