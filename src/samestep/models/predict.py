"""The predictions or embeddings of a trained model for every sample of a dataset, in order, in one file.

Batches are numbered and distributed over the ranks; everything random about one follows from its
number. Each round's results are sent to rank 0, which writes them: the file is bit-identical
at any number of ranks, and no rank ever holds more than one round of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from samestep.checkpoint.files import refuse_existing
from samestep.data.batch import LaneBatch
from samestep.data.sequential import SequentialSource
from samestep.distributed.context import RunContext
from samestep.distributed.health.activity import COMPUTE
from samestep.errors import TaskError
from samestep.evaluation.eval_mode import BufferSnapshot, refuse_changed
from samestep.models.tables import INDEX, Column, Table, format_of, new_table
from samestep.models.trained_model import Opened, dataset_of, open_trained, refuse_without_embeddings
from samestep.tracking.progress import CountedProgress

_ONLY = "output"


@dataclass(frozen=True)
class PredictRequest:
    """A request for predictions, and where to write them.

    Args:
        run: the run's directory.
        data: `valid`, `train`, or a name that the task's `predict_data` takes.
        output: the file to write.
        format: csv, jsonl, parquet or npy; by default from the file's suffix.
        which: the checkpoint: best, last or the number of a step.
        weights: raw, ema, swa or average.
        batch: samples per batch; by default as in evaluation or training.
        force: whether an existing file is replaced.
        overrides: `section.key=value` texts for the run's config.
        trust: whether the task's code may run although it is not known to be this user's.
        kind: what the task's `predict` returns, or its `eval_embed`.
        view: which embeddings; all of them by default.
    """

    run: Path
    data: str
    output: Path
    format: str | None = None
    which: str = "best"
    weights: str = "raw"
    batch: int | None = None
    force: bool = False
    overrides: tuple[str, ...] = ()
    trust: bool = False
    kind: Literal["predictions", "embeddings"] = "predictions"
    view: str | None = None


@dataclass(frozen=True)
class Predicted:
    """The predictions that were written."""

    output: str
    format: str
    samples: int
    columns: tuple[str, ...]
    step: int
    weights: str
    world: int


def predict_once(request: PredictRequest, context: RunContext) -> Predicted:
    """Predict, or embed, with the model of a run; every rank calls this, rank 0 writes.

    Args:
        request: what to compute, and where to write it.
        context: this process's place in the run.
    """
    kind = format_of(request.output, request.format)
    if context.is_main and not request.force:
        refuse_existing(request.output)
    opened = open_trained(
        request.run, request.which, context, request.weights, request.batch, request.overrides, request.trust
    )
    step = opened.trained.manifest.step
    if request.kind == "embeddings":
        refuse_without_embeddings(opened.task)
    what = f"data to {'embed' if request.kind == 'embeddings' else 'predict'} ({request.data})"
    source = opened.source(dataset_of(opened.task, request.data), what)
    samples = source.plan.samples
    doing = "Embedding" if request.kind == "embeddings" else "Predicting"
    context.log.main(f"{doing} {samples} samples with the {request.weights} weights of step {step}")
    with new_table(request.output, kind) if context.is_main else nullcontext() as table:
        _write_all(opened, source, request, table)
        columns = () if table is None else table.names
    predicted = Predicted(str(request.output), kind, samples, columns, step, request.weights, context.world)
    return context.broadcast(predicted)  # no rank succeeds before the file is complete


def _write_all(opened: Opened, source: SequentialSource, request: PredictRequest, table: Table | None) -> None:
    """Predict all samples, in one pass of all ranks; `table` is rank 0's."""
    setup, trained, context = opened.setup, opened.trained, opened.setup.context

    def predict(batch: LaneBatch) -> dict[str, Column]:
        ids = np.asarray(batch.ids, dtype=np.int64)
        if request.kind == "embeddings":
            return {INDEX: ids, **columns_of(opened.embed(batch, request.view), batch)}
        with setup.precision.forward():
            outputs = trained.task.predict(trained.model, batch)
        return {INDEX: ids, **columns_of(outputs, batch)}

    progress = CountedProgress("sample", source.plan.samples, context.log, context.is_main)
    buffers = BufferSnapshot([trained.model, *trained.extra_modules])
    with progress, context.activity.during(COMPUTE):
        for columns in opened.outputs(source, predict):
            assert table is not None, "only rank 0 receives results"
            table.add(columns)
            progress.add(len(columns[INDEX]))
    refuse_changed(context.gather(buffers.changed()), "predicting")


def columns_of(outputs: Any, batch: LaneBatch) -> dict[str, Column]:
    """Return what a task returned for a batch, as columns in host memory.

    Args:
        outputs: a tensor, an array or a list with one entry per sample; or several, by name.
        batch: the batch they are for.

    Raises:
        TaskError: if there is not one entry per sample, or of a type that no file can hold.
    """
    if not isinstance(outputs, Mapping):
        outputs = {_ONLY: outputs}
    columns = {}
    for name, value in outputs.items():
        if not isinstance(name, str) or not name or name == INDEX:
            raise TaskError(
                f"the task named a column {name!r}: a name is text, and {INDEX} is taken by the "
                "sample's index in the dataset"
            )
        columns[name] = _column(name, value)
        if len(columns[name]) != len(batch):
            raise TaskError(
                f"predict() returned {len(columns[name])} entries in column {name!r} for the "
                f"{len(batch)} samples {batch.ids[0]} to {batch.ids[-1]}: return one per sample"
            )
    if not columns:
        raise TaskError("predict() returned no columns: return a tensor, or columns by name")
    return columns


def _column(name: str, value: Any) -> Column:
    if isinstance(value, Tensor):
        # Most file formats have no half precision; float32 holds it exactly.
        value = value.detach()
        half = value.dtype in (torch.bfloat16, torch.float16)
        value = (value.float() if half else value).cpu().numpy()
    if isinstance(value, np.ndarray):
        if value.ndim == 0:
            raise TaskError(f"predict() returned one number as column {name!r}: return one per sample")
        if value.dtype.kind == "f" and value.dtype.itemsize < 4:
            return value.astype(np.float32)
        known = value.dtype.kind in "biuf" and value.dtype.itemsize <= 8
        return value if known else [_plain(name, entry) for entry in value.tolist()]
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    raise TaskError(
        f"predict() returned a {type(value).__name__} as column {name!r}: return a tensor, an array "
        "or a list, with one entry per sample"
    )


def _plain(name: str, value: Any) -> Any:
    """Return a value of a list, in types that every file format knows."""
    # A longdouble has no plain form: its tolist() is itself.
    if isinstance(value, (Tensor, np.ndarray, np.generic)) and not isinstance(value, np.longdouble):
        return _plain(name, value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(name, item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TaskError(
        f"predict() returned a {type(value).__name__} in column {name!r}: return numbers, text, or lists of them"
    )
