"""Samples -> steps -> lanes -> ranks: pure arithmetic, no torch.

Everything that shapes a run is a function of (seed, step, lane). This module decides which
samples a lane gets and which lanes a rank drives; `tree` decides the order of additions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise

from samestep.errors import PlanError

MOST_LANES = 1_000_000
"""And so the most ranks: every one drives a lane."""


@dataclass(frozen=True)
class BatchPlan:
    """The cut of one global batch: `lane_count` equal lanes of `lane_batch` samples."""

    global_batch: int
    lane_count: int

    def __post_init__(self) -> None:
        if self.lane_count < 1 or self.global_batch < 1:
            raise PlanError(f"global_batch {self.global_batch} and lanes {self.lane_count} must both be at least 1")
        if self.lane_count > self.global_batch:
            raise PlanError(
                f"lanes is {self.lane_count} but global_batch is {self.global_batch}: a lane needs at "
                f"least one sample. Set lanes to {self.global_batch} or fewer, or global_batch to "
                f"{self.lane_count} or more"
            )
        if self.global_batch % self.lane_count:
            below = self.global_batch - self.global_batch % self.lane_count
            raise PlanError(
                f"global_batch {self.global_batch} cannot be cut into {self.lane_count} equal lanes. "
                f"Nearest batches: {below} or {below + self.lane_count}; "
                f"nearest lanes: {_near_divisors(self.global_batch, self.lane_count)}"
            )

    @cached_property
    def lane_batch(self) -> int:
        return self.global_batch // self.lane_count


def _near_divisors(number: int, near: int) -> str:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    divisors = {*small, *(number // d for d in small)}
    below = max((d for d in divisors if d < near), default=None)
    above = min((d for d in divisors if d > near), default=None)
    return " or ".join(str(d) for d in (below, above) if d is not None)


@dataclass(frozen=True)
class EpochPlan:
    """The positions of an epoch's order that each lane of each step gets.

    The tail of an epoch fills lanes from the first on, so that all but one lane keep the
    full lane batch; the rest of that step's lanes are empty. `drop_last` leaves it out.
    """

    samples: int
    batch: BatchPlan
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.steps == 0:
            raise PlanError(
                f"{self.samples} samples give no step at global_batch {self.batch.global_batch}"
                + (" with drop_last: true" if self.drop_last and self.samples else "")
                + ". Use a smaller global_batch, more data, or drop_last: false"
            )

    @cached_property
    def steps(self) -> int:
        """Steps in one epoch."""
        whole, rest = divmod(self.samples, self.batch.global_batch)
        return whole + bool(rest and not self.drop_last)

    def positions(self, epoch_step: int, lanes: range) -> range:
        """Positions in the epoch's order that contiguous lanes get in this step; may be empty."""
        begin, size = epoch_step * self.batch.global_batch, self.batch.lane_batch
        start, stop = begin + lanes.start * size, begin + lanes.stop * size
        return range(min(start, self.samples), min(stop, self.samples))

    def locate(self, step: int) -> tuple[int, int]:
        """Return the (epoch, step within the epoch) of a step counted from the run's start."""
        return divmod(step, self.steps)


def deal_lanes(lane_count: int, world: int, weights: Sequence[float] | None = None) -> list[range]:
    """Return the contiguous lanes of each rank; every rank drives at least one.

    Without weights the lanes are dealt as evenly as they go. With weights (one per rank)
    they follow them by largest remainder: `[3, 1]` over 8 lanes gives 6 and 2.
    """
    if lane_count > MOST_LANES:
        raise PlanError(
            f"{lane_count} lanes are more than {MOST_LANES}, each a pass of its own: use fewer ranks, "
            "or a lower accumulation"
        )
    if world > lane_count:
        raise PlanError(
            f"{world} ranks but only {lane_count} lanes: every rank drives at least one lane. "
            f"Start {lane_count} ranks or fewer, or set lanes to {world} or more (which is another run)"
        )
    shares = [Fraction(1)] * world if weights is None else [Fraction(w) for w in weights]
    if len(shares) != world:
        raise PlanError(
            f"distributed.lane_weights has {len(shares)} entries but the run has {world} ranks: "
            "give one weight per rank"
        )
    if any(share <= 0 for share in shares):
        raise PlanError(f"distributed.lane_weights {list(weights or ())} must all be above zero")
    ends = list(accumulate(_apportion(lane_count, shares)))
    return [range(start, end) for start, end in pairwise([0, *ends])]


def deal_rounds(lane_count: int, world: int) -> list[range]:
    """Return the lanes of each rank where all ranks run the lanes of one round at once, W consecutive ones.

    The owner of a gradient adds up what each round brings, and holds few partial sums. With contiguous lanes
    it would hold one per rank.

    Raises:
        PlanError: There are fewer lanes than ranks.
    """
    deal_lanes(lane_count, world)
    return [range(rank, lane_count, world) for rank in range(world)]


def deal_fewer(lane_count: int, by_rank: Sequence[range]) -> list[range]:
    """Deal fewer lanes to ranks in the proportions of an assignment; some ranks may get none.

    Args:
        lane_count: How many there are to deal.
        by_rank: The lanes of each rank, if there were as many as it has.
    """
    if any(lanes.step > 1 for lanes in by_rank):
        return [range(lanes.start, lane_count, lanes.step) for lanes in by_rank]
    busy = [rank for rank, lanes in enumerate(by_rank) if lanes][:lane_count]
    dealt = deal_lanes(lane_count, len(busy), [len(by_rank[rank]) for rank in busy])
    found = [range(lane_count, lane_count)] * len(by_rank)
    for rank, lanes in zip(busy, dealt, strict=True):
        found[rank] = lanes
    return found


def _apportion(lane_count: int, shares: Sequence[Fraction]) -> list[int]:
    if len(set(shares)) == 1:  # at once, where a million fractions take minutes
        each, more = divmod(lane_count, len(shares))
        return [each + 1] * more + [each] * (len(shares) - more)
    spare, total = lane_count - len(shares), sum(shares)
    exact = [max(Fraction(0), share / total * lane_count - 1) for share in shares]
    scale = Fraction(spare) / sum(exact) if sum(exact) else Fraction(0)
    exact = [e * scale for e in exact]
    counts = [1 + int(e) for e in exact]
    by_remainder = sorted(range(len(shares)), key=lambda r: (int(exact[r]) - exact[r], r))
    for rank in by_remainder[: lane_count - sum(counts)]:
        counts[rank] += 1
    return counts


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
