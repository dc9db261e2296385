"""The samples of all lanes, as a loss over the whole global batch sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from samestep.data.batch import LaneBatch, Moment
from samestep.reduce.lane_rows import LaneRows

Gather = Callable[[str, Mapping[int, Any]], Any]


class _GatheredItems(Mapping[str, Any]):
    """The items of all lanes' batches, each gathered when it is first read: pictures, most often, are not."""

    def __init__(self, gather: Gather, mine: Mapping[int, Any], names: list[str]) -> None:
        self._gather, self._mine, self._names = gather, mine, names
        self._found: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._found:
            mine = {lane: data[name] for lane, data in self._mine.items()}
            self._found[name] = self._gather(f"batch.data[{name!r}]", mine)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _GatheredEntries(Sequence[Any]):
    """The same for tuples and lists."""

    def __init__(self, gather: Gather, mine: Mapping[int, Any], size: int) -> None:
        self._gather, self._mine, self._size = gather, mine, size
        self._found: dict[int, Any] = {}

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[at] for at in range(self._size)[place]]
        at = range(self._size)[place]
        if at not in self._found:
            mine = {lane: data[at] for lane, data in self._mine.items()}
            self._found[at] = self._gather(f"batch.data[{at}]", mine)
        return self._found[at]

    def __len__(self) -> int:
        return self._size


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
            return _GatheredEntries(self._gather, mine, len(like))
        return self._gather("batch.data", mine)

    def __len__(self) -> int:
        """Return the number of samples."""
        return sum(self._samples)

    def _gather(self, name: str, mine: Mapping[int, Any]) -> Any:
        return self._rows.gather(name, self._samples, mine)
