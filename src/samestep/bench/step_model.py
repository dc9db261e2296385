"""A model of a step that predicts it on other numbers of ranks. No torch here.

A step is data and compute of a rank's lanes, the update, what of the exchange is not hidden, and the wait for
the slowest rank. The exchange of n bytes in b buckets between W ranks takes
`2 (W - 1) * (b * latency + n / W / bandwidth)`: every rank sends each other one a slice, and then the sum of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from samestep.bench.statistics import Link, Spread
from samestep.errors import PlanError

Row = Mapping[str, Any]
BUCKET_BYTES = 25 << 20
"""As `samestep.reduce.tree_sum` cuts gradients."""
BACKWARD = 2 / 3
"""How much of a lane's compute is the backward pass, behind which gradients travel."""


def exchange_seconds(link: Link, world: int, size: float, bucket: float = BUCKET_BYTES) -> float:
    """What all gradients take between ranks, if nothing hides it.

    Args:
        link: A message between two ranks.
        world: The number of ranks.
        size: Bytes of all gradients.
        bucket: Bytes of what is sent at once.
    """
    messages = 2 * (world - 1)
    return messages * (math.ceil(size / bucket) * link.latency + size / world / link.bandwidth)


def link_of(world: int, latency: float, bandwidth: float) -> Link:
    """A message between two ranks, from the line through the sums of a number of ranks."""
    messages = 2 * (world - 1)
    return Link(latency / messages, bandwidth * messages / world)


def straggling(world: int) -> float:
    """How the wait for the slowest grows with the ranks, if their times vary by chance alone."""
    return math.sqrt(2 * math.log(world))


@dataclass(frozen=True)
class StepModel:
    """What is known of a step from the worlds that were measured."""

    lane: Spread
    """Seconds of a lane's data and compute."""
    update: Spread
    link: Sequence[Link]
    """A message between two ranks, of each measured world; the range is between them."""
    exposed: Spread
    """How much of the exchange is not hidden."""
    wait: Spread
    """The wait for the slowest, over `straggling`."""
    correction: Spread
    """What a step takes, over what this model says, in the worlds that were measured."""
    gradient_bytes: int

    def exchange(self, world: int) -> Spread:
        """What of the exchange is not hidden."""
        if world == 1:
            return Spread(0.0, 0.0, 0.0)
        whole = [exchange_seconds(link, world, self.gradient_bytes) for link in self.link]
        return Spread(
            median(whole) * self.exposed.median,
            min(whole) * self.exposed.low,
            max(whole) * self.exposed.high,
        )

    def phases(self, world: int, lanes_of_rank: int) -> dict[str, Spread]:
        """The parts of a step, each with its range."""
        return {
            "compute": _times(self.lane, lanes_of_rank),
            "exchange": self.exchange(world),
            "update": self.update,
            "wait": _times(self.wait, straggling(world)),
        }

    def step(self, world: int, lanes_of_rank: int) -> Spread:
        """Seconds of a step, with the range of all that it is made of."""
        parts = self.phases(world, lanes_of_rank).values()
        return Spread(
            self.correction.median * sum(part.median for part in parts),
            self.correction.low * sum(part.low for part in parts),
            self.correction.high * sum(part.high for part in parts),
        )


def fit_step(rows: Sequence[Row]) -> StepModel:
    """The model of the worlds that were measured, in one mode and with one task.

    Args:
        rows: samestep's own, with their phases.

    Raises:
        PlanError: if there is none with several ranks, or ranks shared cores.
    """
    usable = [row for row in rows if not row["shares_cores"]]
    several = [row for row in usable if row["world"] > 1 and row["link"] is not None]
    if not several:
        crowded = " with cores of their own" if len(usable) < len(rows) else ""
        raise PlanError(
            f"a prediction needs a measured world of two ranks or more{crowded}, whose messages take longer "
            "the larger they are: measure more with --worlds, or give a link by --link"
        )
    links = [link_of(row["world"], **row["link"]) for row in several]
    size = int(several[0]["gradient_bytes"])
    exposed = [
        _times(_phase(row, "exchange"), 1 / exchange_seconds(link, row["world"], size))
        for row, link in zip(several, links, strict=True)
    ]
    waits = [_times(_phase(row, "wait"), 1 / straggling(row["world"])) for row in several]
    found = StepModel(
        lane=_over([lane_seconds(row) for row in usable]),
        update=_over([_phase(row, "update") for row in usable]),
        link=links,
        exposed=_over(exposed),
        wait=_over(waits),
        correction=Spread(1.0, 1.0, 1.0),
        gradient_bytes=size,
    )
    return _corrected(found, usable)


def lane_seconds(row: Row) -> Spread:
    """Data and compute of a lane."""
    data, compute = _phase(row, "data"), _phase(row, "compute")
    both = Spread(data.median + compute.median, data.low + compute.low, data.high + compute.high)
    return _times(both, 1 / lanes_of_rank(row["lanes"], row["world"]))


def lanes_of_rank(lanes: int, world: int) -> int:
    """The most lanes that a rank drives, which the others wait for."""
    return -(-lanes // world)


def _corrected(model: StepModel, rows: Sequence[Row]) -> StepModel:
    """With what its parts leave out: they are measured in steps of their own."""
    found = [
        row["median"] / model.step(row["world"], lanes_of_rank(row["lanes"], row["world"])).median
        for row in rows
    ]
    correction = Spread(median(found), min(found), max(found))
    return StepModel(**{**vars(model), "correction": correction})


def _phase(row: Row, name: str) -> Spread:
    return Spread(**row["phases"][name])


def _times(found: Spread, factor: float) -> Spread:
    return Spread(factor * found.median, factor * found.low, factor * found.high)


def _over(found: Sequence[Spread]) -> Spread:
    """The median of worlds, and the range of all of them."""
    pick: Callable[[str], list[float]] = lambda name: [getattr(one, name) for one in found]  # noqa: E731
    return Spread(median(pick("median")), min(pick("low")), max(pick("high")))
