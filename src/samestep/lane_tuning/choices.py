"""Which numbers of lanes are compared, in which worlds. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.config import Config
from samestep.errors import LaunchError, PlanError
from samestep.foreign.limits import short
from samestep.foreign.numbers import whole_number
from samestep.lanes.plan import MOST_LANES, BatchPlan

USUAL = (1, 2, 4, 8, 16)
"""The numbers of lanes that are compared unless others are given."""


@dataclass(frozen=True)
class Choice:
    """One way to cut and run a global batch."""

    lanes: int
    parallel: int | None = None
    """Lanes side by side in a CUDA graph; None: as configured."""

    @property
    def label(self) -> str:
        """As a person says it."""
        count = "1 lane" if self.lanes == 1 else f"{self.lanes} lanes"
        return count + (f", {self.parallel} at once" if self.parallel else "")


@dataclass(frozen=True)
class Comparison:
    """What is compared, and for how long."""

    lanes: tuple[int, ...]
    parallel: tuple[int, ...] = ()
    """Widths that are tried; none: as configured."""
    rounds: int = 5
    steps: int | None = None
    """Timed steps of a turn; by default about a second's."""

    def choices(self, world: int) -> tuple[Choice, ...]:
        """What this number of ranks can run; widths beyond a rank's lanes are that of all its lanes."""
        found = [
            Choice(lanes, None if width is None else min(width, lanes_of_a_rank(lanes, world)))
            for lanes in self.lanes
            if lanes >= world
            for width in self.parallel or (None,)
        ]
        return tuple(dict.fromkeys(found))


def lanes_of_a_rank(lanes: int, world: int) -> int:
    """The most lanes that a rank drives."""
    return -(-lanes // world)


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """Different whole numbers such as `1,2,4`, from the command line, in order.

    Raises:
        PlanError: for anything else.
    """
    numbers = [whole_number(part.strip()) for part in text.split(",")]
    found = sorted(number for number in numbers if number is not None)
    if len(found) < len(numbers) or not 1 <= found[0] <= found[-1] <= MOST_LANES:
        raise PlanError(f"{option} is {short(repr(text))}: give numbers from 1 on, such as 1,2,4")
    if len(set(found)) < len(found):
        raise PlanError(f"{option} is {short(repr(text))}: give different numbers")
    return tuple(found)


def lanes_to_compare(
    config: Config, wanted: Sequence[int] = (), worlds: Sequence[int] = (1,)
) -> tuple[int, ...]:
    """The numbers of lanes that cut this config's global batch and give some world a lane per rank.

    Args:
        config: The training's config.
        wanted: Chosen by the user; each must be possible. By default the usual ones that are
            possible, and the config's own.
        worlds: The numbers of ranks that are measured.

    Raises:
        PlanError: if that leaves none, or none for one of the worlds.
    """
    if config.batch_per_rank is not None:
        raise PlanError(
            f"batch_per_rank is {config.batch_per_rank}: the lanes then follow from the ranks and "
            "accumulation, and there is nothing to choose. Set global_batch instead"
        )
    own = config.batch_plan(1)
    for lanes in wanted:
        BatchPlan(own.global_batch, lanes)  # which says what is wrong with it
    usual = sorted({*USUAL, own.lane_count})
    found = tuple(wanted) or tuple(n for n in usual if own.global_batch % n == 0)
    for world in worlds:
        if found[-1] < world:
            tried = ", ".join(map(str, found))
            raise PlanError(
                f"{world} ranks need {world} lanes or more, and the numbers of lanes to compare are "
                f"{tried}, for a global_batch of {own.global_batch}: give others by --lanes"
            )
    too_few = [lanes for lanes in wanted if lanes < min(worlds)]
    if too_few:
        raise PlanError(
            f"--lanes has {too_few[0]}, but every rank drives at least one lane, and the ranks are "
            f"{min(worlds)} or more: leave it out, or measure with fewer ranks"
        )
    return tuple(lanes for lanes in found if lanes >= min(worlds))


def refuse_fixed_world(config: Config, ranks_here: int) -> None:
    """Refuse to start ranks for a config of one world, or as a rank of another launcher.

    Args:
        config: The training's config.
        ranks_here: The number of ranks that this process is one of.

    Raises:
        LaunchError: if so.
    """
    if ranks_here > 1:
        raise LaunchError(
            f"--worlds starts ranks, but this process is one of {ranks_here} already: leave out "
            "--worlds to measure with these, or start the command alone"
        )
    if config.distributed.world_size != "auto":
        raise LaunchError(
            f"distributed.world_size is {config.distributed.world_size}, but --worlds measures with "
            "others: pass distributed.world_size=auto"
        )
