"""Lane batches of a map-style dataset, from step n on.

A lane's batch is fetched whole by one loader process, which first seeds python, numpy and
torch for it: neither the number of workers nor the prefetch can change a draw.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from samestep.config.schema import LoaderConfig
from samestep.errors import TaskError
from samestep.orders import Order
from samestep.plan import EpochPlan
from samestep.runtime.randomness import DATA, derive, reseed, seed_at
from samestep.runtime.signals import outlive_stop_signals

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class LaneBatch:
    """One lane's samples of one step, collated, on the run's device."""

    lane: int
    data: Any
    ids: tuple[Any, ...]
    """Which samples these are: dataset indices, or digests for iterable data."""

    @property
    def x(self) -> Any:
        """The first element of a (input, target) batch."""
        return self.data[0]

    @property
    def y(self) -> Any:
        """The second element of a (input, target) batch."""
        return self.data[1]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Position:
    """Where a run stands in its data: the next step to run."""

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    streams: Mapping[int, Any] = field(default_factory=dict)
    """By lane, the state of a stream that can say and take one; other streams are read again."""


@dataclass(slots=True)
class StepData:
    """What one step consists of, before its batches are read."""

    index: int
    epoch: int
    epoch_step: int
    ends_epoch: bool
    lanes: tuple[int, ...]
    """This rank's lanes that have samples in this step."""
    ragged: bool
    """Whether some rank has no samples at all in this step."""
    read: Callable[[], LaneBatch]
    """The next of those lanes' batches."""
    streams: Mapping[int, Any] = field(default_factory=dict)
    """States of this rank's streams after this step, by lane."""

    @property
    def following(self) -> Position:
        """Where the run stands after this step, as far as this rank knows."""
        if self.ends_epoch:
            return Position(self.index + 1, self.epoch + 1, 0)
        return Position(self.index + 1, self.epoch, self.epoch_step + 1, self.streams)


@dataclass(frozen=True)
class Lanes:
    """Who drives what: the lanes of each rank, and how they are cut out of the plan's lanes."""

    assignment: tuple[range, ...]
    rank: int
    fused: bool = False
    """A rank's lanes are one batch (`same: samples`)."""

    @property
    def units(self) -> tuple[range, ...]:
        """What each rank runs one after the other: its lanes, or all of them at once."""
        if self.fused:
            return tuple(range(rank, rank + 1) for rank in range(len(self.assignment)))
        return self.assignment

    @property
    def mine(self) -> range:
        return self.units[self.rank]

    def plan_lanes(self, unit: int) -> range:
        """The plan's lanes that a unit covers."""
        return self.assignment[unit] if self.fused else range(unit, unit + 1)


class Source(ABC):
    """Where steps come from."""

    has_streams = False
    """Whether positions hold states of streams, which each rank knows only of its own lanes."""

    @abstractmethod
    def steps(self, start: Position, stop: int | None) -> Iterator[StepData]:
        """Steps from `start` up to step `stop` (or for ever), epoch after epoch."""


class LaneRequest(NamedTuple):
    """What a loader process needs to fetch one lane's batch."""

    lane: int
    indices: tuple[int, ...]
    seed: int


class _LaneReader(Dataset[Any]):
    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate
        self._fetch_many = getattr(dataset, "__getitems__", None)

    def __getitem__(self, request: LaneRequest) -> Any:
        reseed(request.seed)
        if self._fetch_many is not None:
            return self._collate(self._fetch_many(list(request.indices)))
        return self._collate([self._dataset[index] for index in request.indices])


class _Requests(Sampler[LaneRequest]):
    def __init__(self, requests: Iterator[LaneRequest]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[LaneRequest]:
        return self._requests


class MapSource(Source):
    """Steps of a dataset that has a length and can be indexed."""

    def __init__(
        self,
        dataset: Any,
        order: Order,
        plan: EpochPlan,
        lanes: Lanes,
        seed: int,
        loader: LoaderConfig,
        pin_memory: bool,
        collate: Collate | None = None,
    ) -> None:
        self.plan = plan
        self._reader = _LaneReader(dataset, collate or default_collate)
        self._order = order
        self._lanes = lanes
        self._seed = seed
        self._loader = loader
        self._pin_memory = pin_memory
        self._ordered: tuple[int, Sequence[int]] = (-1, ())

    def steps(self, start: Position, stop: int | None) -> Iterator[StepData]:
        issued: deque[LaneRequest] = deque()
        requests = self._requests(start.step, stop, issued)
        batches = self._read_ahead(requests) if self._loader.workers else self._read_here(requests)

        def read() -> LaneBatch:
            data = next(batches)
            request = issued.popleft()
            return LaneBatch(request.lane, data, request.indices)

        step = start.step
        while stop is None or step < stop:
            epoch, epoch_step = self.plan.locate(step)
            lanes, ragged = self._filled(epoch_step)
            yield StepData(
                index=step,
                epoch=epoch,
                epoch_step=epoch_step,
                ends_epoch=epoch_step == self.plan.steps - 1,
                lanes=lanes,
                ragged=ragged,
                read=read,
            )
            step += 1

    def _filled(self, epoch_step: int) -> tuple[tuple[int, ...], bool]:
        """This rank's lanes with samples, and whether some rank has none."""
        if (epoch_step + 1) * self.plan.batch.global_batch <= self.plan.samples:
            return tuple(self._lanes.mine), False
        filled = [
            tuple(unit for unit in units if self._positions(epoch_step, unit))
            for units in self._lanes.units
        ]
        return filled[self._lanes.rank], not all(filled)

    def _positions(self, epoch_step: int, unit: int) -> list[range]:
        cut = [self.plan.positions(epoch_step, lane) for lane in self._lanes.plan_lanes(unit)]
        return [positions for positions in cut if positions]

    def _requests(
        self, start: int, stop: int | None, issued: deque[LaneRequest]
    ) -> Iterator[LaneRequest]:
        step = start
        while stop is None or step < stop:
            epoch, epoch_step = self.plan.locate(step)
            for unit in self._lanes.mine:
                positions = self._positions(epoch_step, unit)
                if positions:
                    order = self._epoch_order(epoch)
                    picked = order[positions[0].start : positions[-1].stop]
                    seed = self._draws_from(unit, epoch, epoch_step)
                    request = LaneRequest(unit, tuple(np.asarray(picked).tolist()), seed)
                    issued.append(request)
                    yield request
            step += 1

    def _draws_from(self, unit: int, epoch: int, epoch_step: int) -> int:
        """The seed of what is drawn while a batch is read."""
        return seed_at(derive(self._seed, DATA, unit), epoch, epoch_step)

    def _epoch_order(self, epoch: int) -> Sequence[int]:
        if self._ordered[0] != epoch:
            order = self._order(self._seed, epoch)
            if len(order) != self.plan.samples:
                raise TaskError(
                    f"the order gave {len(order)} samples in epoch {epoch} but "
                    f"{self.plan.samples} at first: give the same number in every epoch"
                )
            self._ordered = (epoch, order)  # type: ignore[assignment]
        return self._ordered[1]

    def _read_here(self, requests: Iterator[LaneRequest]) -> Iterator[Any]:
        for request in requests:
            data = self._reader[request]
            yield pinned(data) if self._pin_memory else data

    def _read_ahead(self, requests: Iterator[LaneRequest]) -> Iterator[Any]:
        return iter(
            DataLoader(
                self._reader,
                batch_size=None,
                sampler=_Requests(requests),
                collate_fn=as_it_is,
                num_workers=self._loader.workers,
                prefetch_factor=self._loader.prefetch,
                pin_memory=self._pin_memory,
                worker_init_fn=outlive_stop_signals,
                # Its own generator: the loader draws a base seed, and must not draw it from ours.
                generator=torch.Generator(),
            )
        )


def as_it_is(batch: Any) -> Any:
    """For loaders whose dataset gives whole batches."""
    return batch


def is_map_style(dataset: Any) -> bool:
    """Whether a dataset can be indexed and has a length."""
    return (
        not isinstance(dataset, IterableDataset)
        and isinstance(dataset, Sized)
        and hasattr(dataset, "__getitem__")
    )


def pins_memory(loader: LoaderConfig, device: torch.device) -> bool:
    """Whether batches for this device are read into page-locked memory."""
    asked = loader.pin_memory
    return device.type == "cuda" if asked == "auto" else bool(asked)


_WORTH_A_STREAM = 1 << 20
"""Bytes of a tensor from which on a copy beside the computation gains more than it costs."""


def is_large(data: Any) -> bool:
    """Whether a batch should be copied beside what the device computes."""
    return any(
        isinstance(leaf, torch.Tensor) and leaf.nbytes > _WORTH_A_STREAM for leaf in leaves_of(data)
    )


class DeviceCopies:
    """Brings batches to the device; large ones beside what a GPU computes, on another stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_device(self, data: Any) -> Any:
        """The batch with every tensor in it on the device; copies from pinned memory do not wait."""
        if self._stream is None:
            return data
        if not is_large(data):
            return convert(data, lambda tensor: tensor.to(self._device, non_blocking=True))
        here = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copy = convert(data, lambda tensor: tensor.to(self._device, non_blocking=True))
        here.wait_stream(self._stream)
        # Else the allocator would give its memory to the next copy while it is still in use.
        convert(copy, lambda tensor: _used_on(tensor, here))
        return copy


def _used_on(tensor: Any, stream: torch.cuda.Stream) -> Any:
    if isinstance(tensor, torch.Tensor):
        tensor.record_stream(stream)
    return tensor


def pinned(data: Any) -> Any:
    """The batch with every tensor in it in page-locked memory."""
    return convert(data, lambda tensor: tensor.pin_memory())


def convert(data: Any, change: Callable[[Any], Any]) -> Any:
    """The batch with every tensor in it changed."""
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, dict):
        return {key: convert(value, change) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(convert(value, change) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)([convert(value, change) for value in data])
    # Batches of other libraries (a transformers BatchEncoding, a packed sequence) move themselves.
    return change(data) if hasattr(data, "to") and hasattr(data, "pin_memory") else data


def leaves_of(data: Any) -> Iterator[Any]:
    """What a batch holds, one after the other."""
    if isinstance(data, torch.Tensor):  # first, since it is what most leaves are
        yield data
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from leaves_of(value)
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from leaves_of(value)
    else:
        yield data
