"""Checks rows of results before anything is computed from them, and tells which of them measure the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)  # fmt: skip

from samestep.bench.statistics import Spread
from samestep.errors import TextError
from samestep.parsing.limits import short

Row = Mapping[str, Any]

_IDENTITY = (
    "mode", "workload", "variant", "precision", "world", "backend", "lanes", "global_batch", "operation", "bytes",
    "part", "lanes_per_rank",
)  # fmt: skip
"""Fields that say what was measured; the others say what came out."""
_SPREAD = ("median", "low", "high")


def identity(kind: str, row: Row) -> tuple[object, ...]:
    """Return what a row measured: equal for two measurements of the same."""
    leak = row.get("leak") or {}
    whose = ("leak" in row, leak.get("rank"), leak.get("memory"))
    return (kind, *whose, *(row.get(name) for name in _IDENTITY))


def spread(row: Row) -> Spread:
    """Return a figure with its range."""
    return Spread(*(float(row[name]) for name in _SPREAD))


class _Row(BaseModel):
    """Fields of every row; others are kept as they are."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    world: PositiveInt
    seconds: Annotated[list[PositiveFloat], Field(min_length=1)] | None = None


class _Timed(_Row):
    median: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat


class _Range(BaseModel):
    """A ratio with its range."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    median: float
    low: float
    high: float


class _Scaling(_Timed):
    mode: Literal["weak", "strong"]
    workload: str
    variant: str
    precision: str
    backend: str
    global_batch: NonNegativeInt
    efficiency: _Range | None = None
    ratio_to_ddp: _Range | None = None
    phases: dict[str, _Range] | None = None


class _Memory(_Row):
    """Sizes are None where a part cannot be told from the others."""

    part: str
    predicted_bytes: float | None = None
    measured_bytes: float | None = None
    low: float | None = None
    high: float | None = None


class _Comm(_Timed):
    operation: str
    bytes: NonNegativeInt
    bus_bytes: float


class _Growth(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    leaks: bool
    rank: int
    host: str
    slope_bytes_per_step: float
    low: float
    high: float
    steps: float


class _Leak(_Row):
    leak: _Growth


_KINDS: Mapping[str, type[_Row]] = {"scaling": _Scaling, "memory": _Memory, "comm": _Comm}


def check_rows(file: Path, kind: str, rows: object) -> None:
    """Refuse rows that a report could not be made of.

    Raises:
        TextError: with the first field that is missing, or holds something else.
    """
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        if not isinstance(row, dict):
            raise TextError(f"{file}: row {number} of kind {short(repr(kind))} holds no fields")
        model = _Leak if "leak" in row else _KINDS.get(kind, _Row)
        try:
            model.model_validate(row)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            raise TextError(
                f"{file}: row {number} of kind {short(repr(kind))} has {name} {short(repr(row.get(name)))}, which a "
                "report cannot be made of"
            ) from None
