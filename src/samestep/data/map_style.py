"""Lane batches of a map-style dataset, from step n on.

A lane's batch is fetched whole by one loader process, which first seeds python, numpy and
torch for it: neither the number of workers nor the prefetch can change a draw.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset, default_collate

from samestep.data.batch import Collate, LaneBatch, Position, Source, StepData
from samestep.data.device import pins_above, pins_memory
from samestep.data.orders import Order
from samestep.distributed.signals import outlive_stop_signals
from samestep.errors import TaskError
from samestep.lanes.plan import EpochPlan
from samestep.lanes.random_streams import DATA, derive, reseed, seed_at
from samestep.pytree import pin
from samestep.run_setup import RunSetup


class LaneRequest(NamedTuple):
    """A request to a loader process for one lane's batch."""

    lane: int
    indices: tuple[int, ...]
    seed: int


class _LaneReader(Dataset[Any]):
    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate
        self._fetch_many = getattr(dataset, "__getitems__", None)

    def __getitem__(self, request: LaneRequest) -> Any:
        rows = _rows_of(self._dataset, request.indices) if self._collate is default_collate else None
        if rows is not None:
            return rows
        reseed(request.seed)
        if self._fetch_many is not None:
            return self._collate(self._fetch_many(list(request.indices)))
        return self._collate([self._dataset[index] for index in request.indices])


def _rows_of(dataset: Any, indices: Sequence[int]) -> list[torch.Tensor] | None:
    """Return what torch's collate makes of a TensorDataset's samples, without a tensor of each; None of other data."""
    while type(dataset) is Subset:
        dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
    if type(dataset) is not TensorDataset:
        return None
    rows = torch.tensor(indices)
    return [column[rows] for column in dataset.tensors]


class _Requests(Sampler[LaneRequest]):
    """Hands out requests, and remembers those that were issued."""

    def __init__(self, requests: Iterator[LaneRequest], issued: deque[LaneRequest]) -> None:
        self._requests, self._issued = requests, issued

    def __iter__(self) -> Iterator[LaneRequest]:
        for request in self._requests:
            self._issued.append(request)
            yield request


class MapSource(Source):
    """Steps of a dataset that has a length and can be indexed."""

    def __init__(
        self, setup: RunSetup, dataset: Any, order: Order, plan: EpochPlan, collate: Collate | None = None
    ) -> None:
        self.plan = plan
        self.samples, self.steps_per_epoch = plan.samples, plan.steps
        self._setup, self._assignment = setup, setup.assignment
        self._loader = setup.config.loader
        self._pins = pins_memory(self._loader, setup.context.device)
        self._reader = _LaneReader(dataset, collate or default_collate)
        self._order = order
        self._ordered: tuple[int, Sequence[int]] = (-1, ())
        self._my_units = tuple(setup.assignment.my_units)
        mine = setup.assignment.my_lanes
        self._span = range(mine.start, mine[-1] + 1 if mine else mine.start)
        """From this rank's first lane to its last; with lanes dealt by rounds, others' are among them."""
        self._cuts = self._cut_by_unit()
        self._full = self._counts(0)
        """The samples of each unit in a full step."""

    def _cut_by_unit(self) -> list[tuple[int, slice]]:
        """This rank's units, and what each takes of the rank's part of a global batch."""
        size, first = self.plan.batch.lane_batch, self._span.start
        by_unit = [(unit, self._assignment.lanes_of(unit)) for unit in self._my_units]
        return [(unit, slice((lanes.start - first) * size, (lanes.stop - first) * size)) for unit, lanes in by_unit]

    def steps(self, start: Position, stop: int | None) -> Iterator[StepData]:
        step, read = start.step, self._reads(start.step, stop)
        while stop is None or step < stop:
            epoch, epoch_step = self.plan.locate(step)
            if epoch_step == 0 and step > start.step and self._restarts:
                read = self._reads(step, stop)
            units, ragged, samples = self._filled(epoch_step)
            yield StepData(
                index=step,
                epoch=epoch,
                epoch_step=epoch_step,
                ends_epoch=epoch_step == self.plan.steps - 1,
                units=units,
                ragged=ragged,
                read=read,
                total=stop,
                samples=samples,
            )
            step += 1

    @property
    def _restarts(self) -> bool:
        """Return whether each epoch has loader processes of its own, which have the dataset as it is then."""
        return self._loader.workers > 0 and not self._loader.persistent_workers

    def _reads(self, start: int, stop: int | None) -> Callable[[], LaneBatch]:
        """Return what reads the batches from a step on: of its epoch, or of all that follow."""
        if not self._loader.workers:
            return self._read_here(self._requests(start, stop))
        if self._restarts:
            end = start - self.plan.locate(start)[1] + self.plan.steps
            stop = end if stop is None else min(stop, end)
        opened: list[Callable[[], LaneBatch]] = []

        def read() -> LaneBatch:
            # With the first batch, and not before: until then the loop may change the dataset.
            if not opened:
                opened.append(self._read_ahead(self._requests(start, stop)))
            return opened[0]()

        return read

    def _filled(self, epoch_step: int) -> tuple[tuple[int, ...], bool, Sequence[int]]:
        """This rank's units with samples, whether some rank has none, and all units' samples."""
        if (epoch_step + 1) * self.plan.batch.global_batch <= self.plan.samples:
            return self._my_units, False, self._full
        counts = self._counts(epoch_step)
        filled = [tuple(unit for unit in units if counts[unit]) for units in self._assignment.units]
        return filled[self._assignment.rank], not all(filled), counts

    def _counts(self, epoch_step: int) -> list[int]:
        """Return the samples of each unit of all ranks."""
        units = range(sum(map(len, self._assignment.units)))
        return [len(self._positions(epoch_step, unit)) for unit in units]

    def _positions(self, epoch_step: int, unit: int) -> range:
        return self.plan.positions(epoch_step, self._assignment.lanes_of(unit))

    def _requests(self, start: int, stop: int | None) -> Iterator[LaneRequest]:
        step = start
        while stop is None or step < stop:
            epoch, epoch_step = self.plan.locate(step)
            mine = self.plan.positions(epoch_step, self._span)
            if mine:
                # All lanes at once: each cut from an array and made a list by itself costs more.
                order = self._epoch_order(epoch)
                picked = np.asarray(order[mine.start : mine.stop]).tolist()
                for unit, cut in self._cuts:
                    indices = tuple(picked[cut])
                    if indices:  # the tail of an epoch fills the first lanes only
                        yield LaneRequest(unit, indices, self._seed_of(unit, epoch, epoch_step))
            step += 1

    def _seed_of(self, unit: int, epoch: int, epoch_step: int) -> int:
        """Return the seed of what is drawn while a batch is read."""
        return seed_at(derive(self._setup.config.seed, DATA, unit), epoch, epoch_step)

    def _epoch_order(self, epoch: int) -> Sequence[int]:
        if self._ordered[0] != epoch:
            order = self._order(self._setup.config.seed, epoch)
            if len(order) != self.plan.samples:
                raise TaskError(
                    f"the order gave {len(order)} samples in epoch {epoch} but "
                    f"{self.plan.samples} at first: give the same number in every epoch"
                )
            self._ordered = (epoch, order)  # type: ignore[assignment]
        return self._ordered[1]

    def _read_here(self, requests: Iterator[LaneRequest]) -> Callable[[], LaneBatch]:
        fetch, pins, above = self._reader.__getitem__, self._pins, pins_above(self._loader)

        def read() -> LaneBatch:
            request = next(requests)
            data = fetch(request)
            return LaneBatch(request.lane, pin(data, above) if pins else data, request.indices)

        return read

    def _read_ahead(self, requests: Iterator[LaneRequest]) -> Callable[[], LaneBatch]:
        issued: deque[LaneRequest] = deque()
        batches = iter(
            DataLoader(
                self._reader,
                batch_size=None,
                sampler=_Requests(requests, issued),
                collate_fn=as_it_is,
                num_workers=self._loader.workers,
                prefetch_factor=self._loader.prefetch,
                pin_memory=self._pins,
                worker_init_fn=outlive_stop_signals,
                # Its own generator: the loader draws a base seed, and must not draw it from ours.
                generator=torch.Generator(),
            )
        )

        def read() -> LaneBatch:
            data = next(batches)
            request = issued.popleft()
            return LaneBatch(request.lane, data, request.indices)

        return read


def as_it_is(batch: Any) -> Any:
    """Return it unchanged: the `collate` of datasets that yield whole batches."""
    return batch


def is_map_style(dataset: Any) -> bool:
    """Return whether a dataset can be indexed and has a length."""
    return not isinstance(dataset, IterableDataset) and isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")
