"""Sources of steps in one process, or as one rank of several sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from samestep.config import load_config
from samestep.data.batch import LaneBatch, Position, Source, StepData
from samestep.distributed.context import SingleProcessContext
from samestep.run_setup import RunSetup


class Rank(SingleProcessContext):
    """One rank of several, in a process that is alone: it may gather nothing."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        self._rank, self._world = rank, world

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world(self) -> int:
        return self._world


def setup_of(rank: int = 0, world: int = 1, **values: Any) -> RunSetup:
    config = load_config({"global_batch": 4, "lanes": 4, "epochs": 2, "seed": 3, **values})
    return RunSetup.create(config, Rank(rank, world))


def read(data: StepData) -> list[LaneBatch]:
    return [data.read() for _ in data.units]


def batches(
    source: Source, stop: int | None = None, start: Position | None = None
) -> Iterator[tuple[StepData, list[LaneBatch]]]:
    for data in source.steps(start or Position(), stop):
        yield data, read(data)


def contents(
    source: Source, stop: int | None = None, start: Position | None = None
) -> list[list[tuple[int, Any, Any]]]:
    """By step, each batch as (lane, data as lists, ids)."""
    return [[(batch.lane, plain(batch.data), batch.ids) for batch in step] for _, step in batches(source, stop, start)]


def plain(data: Any) -> Any:
    if isinstance(data, Tensor):
        return data.tolist()
    return [plain(part) for part in data] if isinstance(data, (list, tuple)) else data


class Letters:
    """Samples `lane.number`: so many in each lane."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def lane_stream(self, lane: int, lanes: int, seed: int, epoch: int) -> Iterable[str]:
        assert lanes == len(self.counts)
        return (f"{epoch}.{lane}.{number}" for number in range(self.counts[lane]))
