"""Patterns, the cells of fields that count, out of NetCDF files: their masks, their statistics, and datasets of them.

The files are read in blocks, one for each time, whoever reads them: so what is computed of blocks and joined in their
order has the same bits on any number of ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fields import LEVELS, VARIABLES, Variable, netcdf
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from samestep import RunContext
from samestep.errors import TaskError

LEAST_STD = 1e-6
"""A column that varies less is only shifted."""
_THICKEST = 500.0
_AIR = (183.15, 333.15)
Rows = NDArray[np.float32]
_MASKS = ("sea_ice", "ocean", "both", "none")
_FILES = ("atmosphere", "ocean")


@lru_cache(maxsize=8)
def _described(path: Path) -> dict[str, Variable]:
    """Return the variables of a NetCDF file that have times, by name."""
    with netcdf().open_dataset(path, decode_times=False) as dataset:
        return {
            str(name): Variable(
                str(path), str(found.attrs.get("standard_name", name)), str(found.attrs.get("units", "1")),
                "level" in found.dims,
            )
            for name, found in dataset.data_vars.items()
            if "time" in found.dims
        }  # fmt: skip


@dataclass(frozen=True)
class Fields:
    """What is read of which files."""

    atmosphere: Path
    ocean: Path
    inputs: Sequence[str]
    outputs: Sequence[str]
    mask: str = "sea_ice"
    """sea_ice: where there is ice; ocean: where there is none; both: wherever there is water; none: every cell whose
    numbers are all finite, for files without ice."""
    least_ice: float = 0.05
    level: int = LEVELS - 1
    valid_every: int = 5
    """Every so many times, one is only measured on: cells next to each other in time or space are nearly equal."""
    thin: float = 1.0
    """The share of the cells that is kept, the same cells for everybody."""

    def __post_init__(self) -> None:
        if not self.inputs or not self.outputs:
            raise TaskError("params.inputs or params.outputs is empty: give names of variables in the files")
        if self.mask not in _MASKS:
            raise TaskError(f"params.mask is {self.mask!r}: give {', '.join(_MASKS)}")
        if not 0 < self.thin <= 1 or self.valid_every < 2:
            raise TaskError(
                f"params.thin is {self.thin} and params.valid_every {self.valid_every}: give a share above 0 and at "
                "most 1, and a number of times of at least 2"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of a pattern's numbers."""
        return (*self.inputs, *self.outputs)

    def refuse_missing(self) -> None:
        """Refuse paths without a file, and files without a field."""
        for file in _FILES:
            path: Path = getattr(self, file)
            if not path.is_file():
                raise TaskError(
                    f"params.{file} is {path}, and there is no such file: give yours, or make some up with "
                    "recipes/emulator/fields.py"
                )
        missing = [name for name in self._read_names() if not self.variable(name).file]
        if missing:
            there = sorted({name for file in _FILES for name in _described(getattr(self, file))})
            raise TaskError(
                f"neither {self.atmosphere} nor {self.ocean} has {', '.join(missing)}: there are {', '.join(there)}"
            )

    def variable(self, name: str) -> Variable:
        """Return where a field is and what it is, by the files themselves; without them, by what the made-up ones have."""
        for file in _FILES:
            path: Path = getattr(self, file)
            found = _described(path).get(name) if path.is_file() else None
            if found is not None:
                return found._replace(file=file)
        unknown = Variable("", name, "1")
        return unknown if all(getattr(self, file).is_file() for file in _FILES) else VARIABLES.get(name, unknown)

    def _read_names(self) -> list[str]:
        """Return the columns, and what the mask looks at."""
        looked = () if self.mask == "none" else ("aice", "hi", "tair")
        return list(dict.fromkeys((*self.columns, *looked)))

    def times(self) -> int:
        """Return how many times both files have."""
        xr = netcdf()
        counts = []
        for path in (self.atmosphere, self.ocean):
            with xr.open_dataset(path, decode_times=False) as dataset:
                counts.append(int(dataset.sizes["time"]))
        if len(set(counts)) > 1:
            raise TaskError(f"{self.atmosphere} has {counts[0]} times, and {self.ocean} has {counts[1]}")
        return counts[0]

    def is_valid(self, time: int) -> bool:
        """Return whether a time is only measured on."""
        return time % self.valid_every == self.valid_every - 1

    def read(self, time: int) -> Rows:
        """Return the patterns of one time: inputs, then outputs."""
        values = self._values(time)
        rows = np.stack([values[name] for name in self.columns], 1)
        return rows[self._counts(values, rows, time)]

    def _values(self, time: int) -> dict[str, Rows]:
        xr = netcdf()
        found = {}
        for file in _FILES:
            with xr.open_dataset(getattr(self, file), decode_times=False) as dataset:
                for name in self._read_names():
                    if self.variable(name).file != file:
                        continue
                    at: dict[str, Any] = {"time": time}
                    if "level" in dataset[name].dims:
                        at["level"] = self.level
                    found[name] = dataset[name].isel(at).to_numpy().astype(np.float32).ravel()
        return found

    def _counts(self, values: dict[str, Rows], rows: Rows, time: int) -> NDArray[np.bool_]:
        """Return which cells count."""
        kept = np.isfinite(rows).all(1)
        if self.mask != "none":
            kept &= (values["tair"] >= _AIR[0]) & (values["tair"] <= _AIR[1])
            kept &= values["hi"] <= _THICKEST
        if self.mask == "sea_ice":
            kept &= (values["aice"] > self.least_ice) & (values["hi"] > 0)
        elif self.mask == "ocean":
            kept &= values["aice"] <= self.least_ice
        if self.thin < 1:
            # By the cell's own number: neither a rank nor a run decides.
            kept &= np.random.default_rng(time).random(len(kept)) < self.thin
        return kept


class Moments(NamedTuple):
    """Of some rows: how many, their mean, and the sum of their squared distances from it."""

    count: int
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Rows) -> Moments:
        wide = rows.astype(np.float64)
        mean = wide.mean(0) if len(rows) else np.zeros(rows.shape[1])
        return cls(len(rows), mean, ((wide - mean) ** 2).sum(0))

    def merge(self, other: Moments) -> Moments:
        """Of both together: no difference of large sums, which would cancel."""
        count = self.count + other.count
        if not count:
            return self
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        squares = self.squares + other.squares + apart**2 * (self.count * other.count / count)
        return Moments(count, mean, squares)

    def scale(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each column; 1 for one that does not vary."""
        std = np.sqrt(self.squares / max(self.count, 1))
        std[std <= LEAST_STD] = 1.0
        return torch.from_numpy(self.mean).float(), torch.from_numpy(std).float()


@dataclass
class Patterns:
    """How many patterns each time has, and what those to train on are like."""

    fields: Fields
    counts: Sequence[int]
    moments: Moments

    @classmethod
    def look(cls, fields: Fields, context: RunContext | None = None) -> Patterns:
        """Look at all patterns: each rank at its share of the times.

        Args:
            fields: what to read.
            context: this process's place among ranks that do this together; None to do all of it here.
        """
        times = fields.times()
        rank, world = (0, 1) if context is None else (context.rank, context.world)
        mine = {
            time: Moments.of(fields.read(time)) for time in range(times * rank // world, times * (rank + 1) // world)
        }
        found = [mine] if context is None else context.gather(mine)
        by_time = {time: moments for share in found for time, moments in share.items()}
        whole = Moments.of(np.empty((0, len(fields.columns)), np.float32))
        for time in range(times):
            if not fields.is_valid(time):
                whole = whole.merge(by_time[time])
        patterns = cls(fields, [by_time[time].count for time in range(times)], whole)
        if not whole.count or not sum(patterns.counts) > whole.count:
            raise TaskError(
                f"{fields.ocean} has {whole.count} patterns to train on and {sum(patterns.counts) - whole.count} to "
                f"validate with, where the mask is {fields.mask}: another mask, or more times"
            )
        return patterns

    def dataset(self, valid: bool, pieces: Sequence[range]) -> PatternRows:
        """Those to train on, or to validate with.

        Args:
            valid: which of them.
            pieces: numbers of patterns that are read, and kept, together.
        """
        times = [t for t in range(len(self.counts)) if self.fields.is_valid(t) == valid]
        return PatternRows(self.fields, times, [self.counts[t] for t in times], pieces)

    def rows(self, valid: bool) -> int:
        """Return how many there are."""
        return sum(count for time, count in enumerate(self.counts) if self.fields.is_valid(time) == valid)


@dataclass
class PatternRows(Dataset[Tensor]):
    """Patterns by their numbers. A piece is read when one of its rows is asked for, and kept."""

    fields: Fields
    times: Sequence[int]
    counts: Sequence[int]
    pieces: Sequence[range]
    _held: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ends = np.cumsum(self.counts)
        self._starts = [piece.start for piece in self.pieces]
        self._read = lru_cache(maxsize=1)(self.fields.read)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def held(self) -> int:
        """How many patterns this process keeps."""
        return sum(len(rows) for rows in self._held.values())

    def __getitem__(self, number: int) -> Tensor:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Tensor]:
        wanted = np.asarray(numbers)
        found = torch.empty(len(wanted), len(self.fields.columns))
        piece_of = np.searchsorted(self._starts, wanted, side="right") - 1
        for piece in np.unique(piece_of).tolist():
            here = torch.from_numpy(piece_of == piece)
            found[here] = self._piece(piece)[wanted[here.numpy()] - self.pieces[piece].start]
        return list(found.unbind())

    def _piece(self, number: int) -> Tensor:
        if number not in self._held:
            piece = self.pieces[number]
            rows = np.empty((len(piece), len(self.fields.columns)), np.float32)
            for at, part in self._parts(piece):
                rows[at : at + len(part)] = part
            self._held[number] = torch.from_numpy(rows)
        return self._held[number]

    def _parts(self, piece: range) -> Iterable[tuple[int, Rows]]:
        """Yield what each time has of a piece, and where in the piece it belongs."""
        at = piece.start
        place = bisect_right(self._ends, at)
        while at < piece.stop:
            first = int(self._ends[place]) - self.counts[place]
            part = self._read(self.times[place])[at - first : piece.stop - first]
            yield at - piece.start, part
            at += len(part)
            place += 1
