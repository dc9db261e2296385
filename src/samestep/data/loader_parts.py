"""A person's own DataLoader as what a run reads: a dataset, an order, and how batches are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import BaseModel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from samestep.data import orders
from samestep.data.batch import Collate
from samestep.data.orders import Indices, Order
from samestep.errors import TaskError
from samestep.lanes.random_streams import order_rng
from samestep.run_setup import RunSetup


@dataclass(frozen=True)
class LoaderParts:
    """The parts that are taken over from a DataLoader."""

    dataset: Any
    order: Order | None
    """None for iterable data."""
    collate: Collate
    setup: RunSetup
    """The run's, with the loader's own workers, pinning and tail."""


def parts_of(loader: DataLoader[Any], setup: RunSetup) -> LoaderParts:
    """Take a DataLoader apart.

    Its batch size must be the run's global batch, which is its own if nothing else has set it. Workers, prefetching, pinning and `drop_last` are
    the loader's; what draws random numbers follows the run's seed.

    Raises:
        TaskError: Something of it cannot be the same at another number of ranks.
    """
    if loader.worker_init_fn is not None:
        raise TaskError(
            "the DataLoader has a worker_init_fn, which would seed by worker: samestep seeds every lane "
            "itself. Remove it; open files in the dataset's __getitem__"
        )
    iterable = isinstance(loader.dataset, IterableDataset)
    _refuse_other_batch(loader, setup)
    order = None if iterable else _order_of(loader.sampler, loader.dataset)
    config = setup.config
    changes: dict[str, Any] = {"drop_last": bool(loader.drop_last)}
    read = _read_options(loader)
    _refuse_contradictions(config, changes, "")
    _refuse_contradictions(config.loader, read, "loader.")
    changes["loader"] = config.loader.model_copy(update=read)
    taken = replace(setup, config=config.model_copy(update=changes))
    return LoaderParts(loader.dataset, order, loader.collate_fn, taken)


def evaluation_parts(loader: DataLoader[Any], setup: RunSetup) -> LoaderParts:
    """Take the DataLoader of validation data apart: each of its samples is read once, in order.

    Raises:
        TaskError: It would leave samples out, or repeat some.
    """
    batch_size_of(loader)
    if loader.drop_last:
        raise TaskError("the DataLoader has drop_last=True: an evaluation takes every sample once. Remove it")
    kind = type(loader.sampler)
    whole = kind in (SequentialSampler, DistributedSampler) or (
        isinstance(loader.sampler, RandomSampler)
        and not loader.sampler.replacement
        and loader.sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if not whole and not isinstance(loader.dataset, IterableDataset):
        raise TaskError(
            f"the DataLoader has a {kind.__name__}: an evaluation takes every sample once, in the "
            "dataset's order. Give it a torch.utils.data.Subset of the dataset instead of a sampler"
        )
    read = setup.config.loader.model_copy(update=_read_options(loader))
    taken = replace(setup, config=setup.config.model_copy(update={"loader": read}))
    return LoaderParts(loader.dataset, None, loader.collate_fn, taken)


def _read_options(loader: DataLoader[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"workers": loader.num_workers, "pin_memory": loader.pin_memory or "auto"}
    if loader.num_workers and loader.prefetch_factor is not None:
        found["prefetch"] = loader.prefetch_factor
    if loader.num_workers:
        found["persistent_workers"] = loader.persistent_workers
    return found


def _refuse_contradictions(section: BaseModel, values: Mapping[str, Any], prefix: str) -> None:
    for name in section.model_fields_set & values.keys():
        if getattr(section, name) != values[name]:
            raise TaskError(
                f"the config sets {prefix}{name} to {getattr(section, name)}, the DataLoader to "
                f"{values[name]}: leave it to the DataLoader, or give run.steps its dataset"
            )


def batch_size_of(loader: DataLoader[Any]) -> int:
    """Return the size of its batches, each of which can be cut into lanes.

    Raises:
        TaskError: It does not cut its batches by samples itself.
    """
    if not isinstance(loader.batch_sampler, BatchSampler | None):
        raise TaskError(
            f"the DataLoader has a batch_sampler of its own ({type(loader.batch_sampler).__name__}), "
            "whose batches cannot be cut into lanes: give it batch_size and a sampler, or run.steps a "
            "dataset with an order"
        )
    if loader.batch_size is None:
        raise TaskError(
            "the DataLoader has batch_size=None, so that its dataset makes the batches: lanes are cut by "
            "samples. Give it the global batch as its batch_size"
        )
    return loader.batch_size


def _refuse_other_batch(loader: DataLoader[Any], setup: RunSetup) -> None:
    size, whole = batch_size_of(loader), setup.batch.global_batch
    if size == whole:
        return
    world = setup.context.world
    per_rank = f" If {size} was meant for each of {world} ranks, that is {size * world} in all:" * (world > 1)
    raise TaskError(
        f"the DataLoader has batch_size={size}, and global_batch is {whole}. In samestep a DataLoader's "
        f"batch is the global batch, whatever the number of ranks.{per_rank} set both to one number. Where "
        "global_batch is not set, it is the batch_size of the first DataLoader that run.prepare gets"
    )


def _order_of(sampler: Any, dataset: Any) -> Order:
    """Return the order that a sampler stands for, drawn from the run's seed."""
    kind = type(sampler)
    if kind is SequentialSampler:
        return orders.sequential(len(dataset))
    if kind is RandomSampler:
        return _random(sampler, len(dataset))
    if kind is WeightedRandomSampler:
        return _weighted(sampler)
    if kind is SubsetRandomSampler:
        return _subset(sampler)
    if kind is DistributedSampler:
        # Its ranks are not the run's lanes, which cut every batch themselves.
        shuffles = bool(sampler.shuffle)
        return orders.shuffled(len(dataset)) if shuffles else orders.sequential(len(dataset))
    raise TaskError(
        f"the DataLoader has a {kind.__name__}, whose order samestep cannot derive from its seed: give "
        "run.steps the dataset and an order instead, a function of (seed, epoch) that returns indices "
        "(samestep.orders)"
    )


def _random(sampler: Any, samples: int) -> Order:
    count = sampler.num_samples
    if sampler.replacement:
        return lambda seed, epoch: order_rng(seed, epoch).randint(0, samples, count)
    if count > samples:
        raise TaskError(
            f"the DataLoader's RandomSampler draws {count} of {samples} samples without replacement: "
            "set replacement=True, or train more epochs"
        )
    return lambda seed, epoch: order_rng(seed, epoch).permutation(samples)[:count]


def _weighted(sampler: Any) -> Order:
    if not sampler.replacement:
        raise TaskError("the DataLoader's WeightedRandomSampler draws without replacement: set replacement=True")
    # Read in every epoch: a loop may have changed them.
    return lambda seed, epoch: orders.weighted(sampler.weights.tolist(), sampler.num_samples)(seed, epoch)


def _subset(sampler: Any) -> Order:
    def order(seed: int, epoch: int) -> Indices:
        indices = np.asarray(list(sampler.indices), dtype=np.int64)
        return indices[order_rng(seed, epoch).permutation(len(indices))]

    return order
