"""The assignment of lanes to ranks. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class LaneAssignment:
    """The lanes of every rank, and how a rank runs its own.

    A *unit* is what a rank runs in one forward pass: one lane, or, with `fused`, all lanes of
    the rank as one batch.
    """

    by_rank: tuple[range, ...]
    """The plan's lanes of each rank: contiguous, or every W-th lane (`deal_rounds`)."""
    rank: int
    fused: bool = False
    """Whether a rank's lanes are one batch (`same: samples`)."""

    @cached_property
    def units(self) -> tuple[range, ...]:
        """The units of each rank."""
        if self.fused:
            return tuple(range(rank, rank + 1) for rank in range(len(self.by_rank)))
        return self.by_rank

    @property
    def my_lanes(self) -> range:
        """The plan's lanes of this rank."""
        return self.by_rank[self.rank]

    @property
    def my_units(self) -> range:
        """The units that this rank runs one after the other."""
        return self.units[self.rank]

    def lanes_of(self, unit: int) -> range:
        """Return the plan's lanes that a unit covers."""
        return self.by_rank[unit] if self.fused else range(unit, unit + 1)
