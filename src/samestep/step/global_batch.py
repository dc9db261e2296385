"""The samples of all lanes, as a loss over the whole global batch sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from samestep.data.batch import LaneBatch, Moment
from samestep.reduce.lane_rows import LaneRows

Gather = Callable[[str, Mapping[int, Any]], Any]


class _Gathered:
    """Items of all lanes' batches, each gathered when it is first read: pictures, most often, are not."""

    def __init__(self, gather: Gather, mine: Mapping[int, Any], keys: Sequence[Any]) -> None:
        self._keys = keys
        self._of = cache(lambda key: gather(f"batch.data[{key!r}]", {lane: data[key] for lane, data in mine.items()}))

    def __len__(self) -> int:
        return len(self._keys)


class _GatheredItems(_Gathered, Mapping[str, Any]):
    def __getitem__(self, name: str) -> Any:
        if name not in self._keys:
            raise KeyError(name)
        return self._of(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)


class _GatheredEntries(_Gathered, Sequence[Any]):
    """The same for tuples and lists."""

    def __getitem__(self, place: Any) -> Any:
        at = self._keys[place]
        return [self._of(one) for one in at] if isinstance(place, slice) else self._of(at)


class GlobalBatch:
    """The samples of all lanes, in the order of the lanes, as a loss over all of them sees them.

    What it is asked for is gathered from all ranks; what it is not asked for stays where it is.
    """

    def __init__(self, rows: LaneRows, samples: Sequence[int], mine: Sequence[LaneBatch], moment: Moment) -> None:
        self._rows, self._samples, self._mine = rows, samples, mine
        self._moment = moment

    @property
    def step(self) -> int:
        """The step's number in the run, from 0."""
        return self._moment.step

    @property
    def epoch(self) -> int:
        """The epoch's number in the run, from 0."""
        return self._moment.epoch

    @cached_property
    def x(self) -> Any:
        """The first element of (input, target) batches."""
        return self._gather("batch.x", {batch.lane: batch.x for batch in self._mine})

    @cached_property
    def y(self) -> Any:
        """The second element of (input, target) batches."""
        return self._gather("batch.y", {batch.lane: batch.y for batch in self._mine})

    @cached_property
    def data(self) -> Any:
        """The data that the collate function returned; of a mapping, a tuple or a list, what is read of it."""
        mine = {batch.lane: batch.data for batch in self._mine}
        like = self._rows.container("batch.data", mine)
        if type(like) is dict:
            return _GatheredItems(self._gather, mine, list(like))
        if type(like) in (tuple, list):
            return _GatheredEntries(self._gather, mine, range(len(like)))
        return self._gather("batch.data", mine)

    def __len__(self) -> int:
        """Return the number of samples."""
        return sum(self._samples)

    def _gather(self, name: str, mine: Mapping[int, Any]) -> Any:
        return self._rows.gather(name, self._samples, mine)
