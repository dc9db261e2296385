"""Timed steps of one variant, and the rule by which one of two is faster. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from samestep.bench.statistics import Spread, is_clearly_faster, ratio_confidence_interval, spread_of
from samestep.errors import TextError
from samestep.report.format import format_seconds


@dataclass(frozen=True)
class Timed:
    """Steps with some settings."""

    label: str
    world: int = 1
    threads: int = 1
    lanes: int = 1
    global_batch: int = 1
    seconds: tuple[float, ...] = ()
    """Seconds per step in each round, on the slowest rank."""
    peak_bytes: int | None = None
    """Memory of the rank that held most, at most."""
    failed: str = ""
    """Why it could not be measured."""
    notes: tuple[str, ...] = ()
    """What its runs logged about their speed."""

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Timed:
        """Read a document's row."""
        try:
            return _ADAPTER.validate_python(row)
        except ValidationError:
            raise TextError("does not hold what samestep tune measured") from None

    @property
    def of_a_sample(self) -> list[float]:
        """Seconds of a sample in each round: of steps with other batches only this is comparable."""
        return [seconds / self.global_batch for seconds in self.seconds]

    @property
    def rate(self) -> Spread:
        """Samples in a second."""
        return spread_of([1 / seconds for seconds in self.of_a_sample])

    @property
    def shown(self) -> str:
        """A step's time with its range."""
        found = spread_of(self.seconds)
        return f"{format_seconds(found.median)} ({format_seconds(found.low)} to {format_seconds(found.high)})"


_ADAPTER = TypeAdapter(Timed)


def speedup(one: Timed, base: Timed) -> Spread:
    """Return how many times as fast as the other; of too few rounds the range is all that they allow."""
    return ratio_confidence_interval(base.of_a_sample, one.of_a_sample)


def is_faster(one: Timed, base: Timed) -> bool:
    """Return whether it is clearly faster than the other."""
    return is_clearly_faster(speedup(one, base))


def simplest_of_fast(in_order: Sequence[Timed]) -> Timed:
    """Return the first that no other is clearly faster than.

    Args:
        in_order: What was measured, the simplest first.
    """
    measured = [one for one in in_order if not one.failed]
    best = min(measured, key=lambda one: statistics.median(one.of_a_sample))
    return next(one for one in measured if one is best or not is_faster(best, one))
