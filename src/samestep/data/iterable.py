"""Lane batches of iterable data: one stream per lane.

A dataset can shard itself by offering `lane_stream(lane, lanes, seed, epoch)`, an iterable
over that lane's samples. Hugging Face iterable datasets are split by lane. `Strided` makes
lane streams of any deterministic iterable, at the price of reading it once per lane.

A resumed run starts in the middle of its streams. A stream with `state_dict()` and
`load_state_dict()` is put there; any other is read again up to there, as it was read before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from samestep.data.batch import Collate, LaneBatch, Position, Source, StepData
from samestep.data.device import pins_memory
from samestep.data.map_style import as_it_is
from samestep.distributed.signals import outlive_stop_signals
from samestep.errors import TaskError
from samestep.lanes.plan import BatchPlan, LaneAssignment
from samestep.lanes.random_streams import DATA, derive, reseed, seed_at
from samestep.pytree import digest
from samestep.run_setup import RunSetup


@runtime_checkable
class LaneStreams(Protocol):
    """A dataset that shards itself by lane."""

    def lane_stream(self, lane: int, lanes: int, seed: int, epoch: int) -> Iterable[Any]:
        """Return the samples of one lane in one epoch; the same ones on every call.

        Args:
            lane: The lane's number, from 0.
            lanes: How many lanes there are.
            seed: The run's seed.
            epoch: The epoch's number, from 0.
        """
        ...


@runtime_checkable
class _Resumable(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Strided:
    """Every lane takes each n-th sample of an iterable that can be read again, n being the lanes.

    Each lane reads the whole iterable and skips the others' samples. The iterable must yield
    the same samples in the same order every time.

    Args:
        samples: The iterable, or a function that returns one, such as a generator function.

    Example:
        def lines():
            with open("corpus.txt") as file:
                yield from map(encode, file)

        for step in run.steps(samestep.Strided(lines)): ...
    """

    def __init__(self, samples: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        if isinstance(samples, Iterator):
            raise TaskError(
                f"samestep.Strided got a {type(samples).__name__}, which can be read only once, and every lane "
                "reads it, again when a run resumes: give it the function that makes it, without calling it"
            )
        self._samples = samples

    def lane_stream(self, lane: int, lanes: int, seed: int, epoch: int) -> Iterable[Any]:
        samples = self._samples
        return islice(samples() if callable(samples) else samples, lane, None, lanes)


class _HuggingFace:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def lane_stream(self, lane: int, lanes: int, seed: int, epoch: int) -> Iterable[Any]:
        from datasets.distributed import split_dataset_by_node

        part = split_dataset_by_node(self._dataset, rank=lane, world_size=lanes)
        part.set_epoch(epoch)
        return part  # type: ignore[no-any-return]


def lane_streams(dataset: Any) -> LaneStreams:
    """Return the dataset's own lane streams, or those of a Hugging Face iterable dataset."""
    if isinstance(dataset, LaneStreams):
        return dataset
    if _is_hugging_face(dataset):
        return _HuggingFace(dataset)
    raise TaskError(
        f"{type(dataset).__name__} has no length, so it is read as lane streams, but it does not "
        "define how. Give it a method lane_stream(lane, lanes, seed, epoch), use a Hugging Face "
        "iterable dataset, or wrap a deterministic iterable, or the function of a generator, in "
        "samestep.Strided(...)"
    )


def _is_hugging_face(dataset: Any) -> bool:
    return type(dataset).__module__.partition(".")[0] == "datasets"


@dataclass(frozen=True)
class _Portion:
    """The samples that one unit's streams gave for one step."""

    data: Any
    ids: tuple[str, ...]
    full: bool
    states: Mapping[int, Any]
    """By lane, the state of its stream after this portion, if it has one."""


class _PortionReader(IterableDataset[_Portion]):
    """Reads the units' streams in step order; a unit's streams all live in one worker."""

    def __init__(
        self,
        streams: LaneStreams,
        batch: BatchPlan,
        assignment: LaneAssignment,
        seed: int,
        start: Position,
        collate: Collate,
        digest: bool,
    ) -> None:
        self._streams, self._batch, self._assignment = streams, batch, assignment
        self._seed, self._epoch, self._start = seed, start.epoch, start
        self._collate, self._digest = collate, digest

    def __iter__(self) -> Iterator[_Portion]:
        worker = get_worker_info()
        units = list(self._assignment.my_units)
        if worker is not None:
            units = units[worker.id :: worker.num_workers]
            # A lane's stream is read by one worker: a library that looks for workers, as Hugging
            # Face's does, would split it a second time and lose samples.
            torch.utils.data._utils.worker._worker_info = None
        if not units:
            return  # there are more workers than units
        opened = {unit: self._open(unit) for unit in units}
        for unit in units:
            self._read_again(unit, opened[unit])
        for epoch_step in count(self._start.epoch_step):
            for unit in units:
                self._enter(unit, epoch_step)
                yield self._portion(opened[unit])

    def _enter(self, unit: int, epoch_step: int) -> None:
        reseed(seed_at(derive(self._seed, DATA, unit), self._epoch, epoch_step))

    def _open(self, unit: int) -> list[_LaneStream]:
        return [self._open_lane(lane) for lane in self._assignment.lanes_of(unit)]

    def _open_lane(self, lane: int) -> _LaneStream:
        # Some draw when they are called, and not when they are iterated: an order, for example.
        reseed(seed_at(derive(self._seed, DATA, "opening", lane), self._epoch))
        samples = self._streams.lane_stream(lane, self._batch.lane_count, self._seed, self._epoch)
        return _LaneStream(lane, samples, self._start.streams.get(lane))

    def _read_again(self, unit: int, streams: list[_LaneStream]) -> None:
        """Bring streams that could not be put there to the start, with the draws they had."""
        behind = [stream for stream in streams if not stream.placed]
        for epoch_step in range(self._start.epoch_step if behind else 0):
            self._enter(unit, epoch_step)
            for stream in behind:
                stream.take(self._batch.lane_batch)

    def _portion(self, streams: list[_LaneStream]) -> _Portion:
        size = self._batch.lane_batch
        samples = [sample for stream in streams for sample in stream.take(size)]
        ids = tuple(digest(s) if self._digest else "" for s in samples)
        full = len(samples) == size * len(streams)
        data = self._collate(samples) if samples else None
        # Copied: the next portion is read before this one's step ends, and may change it.
        states = {s.lane: copy.deepcopy(s.state()) for s in streams if s.stateful}
        return _Portion(data, ids, full, states)


class _LaneStream:
    """One lane's samples, read from the beginning or from a state that it gave before."""

    def __init__(self, lane: int, samples: Iterable[Any], state: Any | None) -> None:
        self.lane = lane
        # HF datasets have a state too, but lose what is in a shuffle buffer: they are read again.
        self.stateful = isinstance(samples, _Resumable) and not _is_hugging_face(samples)
        self.placed = self.stateful and state is not None
        if self.placed:
            assert isinstance(samples, _Resumable)
            samples.load_state_dict(state)
        self._samples: Any = samples
        self._iterator = iter(samples)

    def take(self, count: int) -> list[Any]:
        return list(islice(self._iterator, count))

    def state(self) -> Any:
        return self._samples.state_dict()


class StreamSource(Source):
    """Steps of iterable data, whose end is agreed on by all ranks."""

    has_streams = True

    samples = None

    def __init__(self, setup: RunSetup, dataset: Any, collate: Collate | None = None, *, digest: bool = False) -> None:
        config = setup.config
        self.steps_per_epoch = config.steps_per_epoch
        self._setup, self._units = setup, setup.assignment.my_units
        self._streams = lane_streams(dataset)
        self._collate, self._digest = collate or default_collate, digest
        self._agree = config.same != "bits" or config.steps_per_epoch is None

    def steps(self, start: Position, stop: int | None) -> Iterator[StepData]:
        step = start.step
        while stop is None or step < stop:
            before = step
            for data in self._epoch(start):
                data.total = stop
                yield data
                step += 1
                if stop is not None and step >= stop:
                    return
            if step == before:
                raise TaskError(f"the iterable data gave no full step in epoch {start.epoch}")
            start = Position(step, start.epoch + 1)

    def _epoch(self, start: Position) -> Iterator[StepData]:
        portions = iter(self._data_loader(start))
        here = self._next(portions, start, 0)
        for done in count(1):
            if here is None:
                return
            ahead = self._next(portions, start, done)
            here.ends_epoch = ahead is None
            yield here
            here = ahead

    def _next(self, portions: Iterator[_Portion], start: Position, done: int) -> StepData | None:
        """Return the step that comes after so many others; None at the end of the epoch."""
        epoch_step = start.epoch_step + done
        if self.steps_per_epoch is not None and epoch_step >= self.steps_per_epoch:
            return None
        mine = [(unit, next(portions)) for unit in self._units]
        filled = [(unit, portion) for unit, portion in mine if portion.ids]
        ragged = None
        if self._agree:
            # One small collective a step: the price of data that does not know its length.
            states = self._setup.context.gather((bool(filled), all(p.full for _, p in mine)))
            if not (all(full for _, full in states) if self._setup.config.drop_last else any(s for s, _ in states)):
                return None
            ragged = not all(some for some, _ in states)
        batches = iter([LaneBatch(unit, portion.data, portion.ids) for unit, portion in filled])
        units = tuple(unit for unit, _ in filled)
        streams = {lane: state for _, p in mine for lane, state in p.states.items()}
        return StepData(start.step + done, start.epoch, epoch_step, False, units, ragged, batches.__next__, streams)

    def _data_loader(self, start: Position) -> DataLoader[_Portion]:
        setup, loader = self._setup, self._setup.config.loader
        reader = _PortionReader(
            self._streams, setup.batch, setup.assignment, setup.config.seed, start, self._collate, self._digest
        )
        # The loader polls its workers in turn: only a divisor of the units keeps each unit's
        # stream with one worker.
        units = len(self._units)
        workers = max((n for n in range(1, loader.workers + 1) if units % n == 0), default=0)
        return DataLoader(
            reader,
            batch_size=None,
            collate_fn=as_it_is,
            num_workers=workers,
            prefetch_factor=loader.prefetch if workers else None,
            pin_memory=pins_memory(loader, setup.context.device),
            worker_init_fn=outlive_stop_signals,
            generator=torch.Generator(),
        )
