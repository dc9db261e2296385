"""Where a run's batches come from: a dataset with a length, or lane streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samestep.config import Config
from samestep.data.batch import Collate, LaneBatch, Lanes, Position, Source
from samestep.data.device import DeviceCopies, pins_memory
from samestep.data.iterable import StreamSource
from samestep.data.map_style import MapSource, is_map_style
from samestep.data.orders import Order, shuffled
from samestep.distributed.context import RunContext
from samestep.lanes.plan import EpochPlan
from samestep.lanes.rng import Streams


def open_source(
    config: Config,
    context: RunContext,
    lanes: Lanes,
    dataset: Any,
    order: Order | None,
    collate: Collate | None,
    *,
    digest: bool = False,
) -> Source:
    """The steps of a dataset; `digest` names the samples of data that have no index."""
    batch, pin = config.batch_plan(context.world), pins_memory(config.loader, context.device)
    if not is_map_style(dataset):
        return StreamSource(
            dataset,
            batch,
            lanes,
            config.seed,
            config.loader,
            pin,
            context.collectives,
            config.steps_per_epoch,
            config.drop_last,
            digest=digest,
            always_agree=config.same != "bits",
            collate=collate,
        )
    order = shuffled(len(dataset)) if order is None else order
    plan = EpochPlan(len(order(config.seed, 0)), batch, config.drop_last)
    return MapSource(dataset, order, plan, lanes, config.seed, config.loader, pin, collate)


def steps_per_epoch(source: Source, config: Config) -> int | None:
    """How many steps an epoch has; None if that shows only at its end."""
    return source.plan.steps if isinstance(source, MapSource) else config.steps_per_epoch


def first_epoch(
    source: Source, config: Config, context: RunContext, streams: Streams, draws: str
) -> Iterator[LaneBatch]:
    """This rank's batches of a run's first epoch, each with the draws of its lane and place."""
    copies = DeviceCopies(context.device)
    # Streams that never end are read as far as the run goes.
    for data in source.steps(Position(), steps_per_epoch(source, config) or config.steps):
        for lane in data.lanes:
            batch = data.read()
            streams.enter(draws, lane, at=(data.epoch_step,))
            yield LaneBatch(lane, copies.to_device(batch.data), batch.ids)
        if data.ends_epoch:
            return
