"""Opens a dataset as a source of steps: one with a length, or lane streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samestep.data.batch import Collate, LaneBatch, Position, Source
from samestep.data.device import DeviceCopies
from samestep.data.generated import Generated, generated_source
from samestep.data.iterable import StreamSource
from samestep.data.map_style import MapSource, is_map_style
from samestep.data.orders import Order, shuffled
from samestep.errors import TaskError
from samestep.lanes.plan import EpochPlan
from samestep.run_setup import RunSetup


def open_source(
    setup: RunSetup, dataset: Any, order: Order | None = None, collate: Collate | None = None, *, digest: bool = False
) -> Source:
    """Return the steps of a dataset.

    Args:
        digest: Whether samples of iterable data get digests as their ids.
    """
    if isinstance(dataset, Generated):
        if order is not None or collate is not None:
            raise TaskError("samestep.Generated makes whole batches: it takes no order or collate function")
        return generated_source(setup, dataset)
    if not is_map_style(dataset):
        return StreamSource(setup, dataset, collate, digest=digest)
    config = setup.config
    order = shuffled(len(dataset)) if order is None else order
    plan = EpochPlan(len(order(config.seed, 0)), setup.batch, config.drop_last)
    return MapSource(setup, dataset, order, plan, collate)


def first_epoch(source: Source, setup: RunSetup, stream: str) -> Iterator[LaneBatch]:
    """This rank's batches of a run's first epoch, each with random numbers of its lane and place."""
    copies = DeviceCopies(setup.context.device)
    # Streams that never end are read as far as the run goes.
    for data in source.steps(Position(), source.steps_per_epoch or setup.config.steps):
        for unit in setup.passes(data.units, data.samples):
            batch = data.read()
            setup.rng.enter(stream, unit, at=(data.epoch_step,))
            yield LaneBatch(unit, copies.to_device(batch.data), batch.ids)
        if data.ends_epoch:
            return
