"""Machines that are not there: what a given link would leave of a step, and what to choose then. No torch here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from samestep.bench.statistics import Link, Spread
from samestep.bench.step_model import BACKWARD, BUCKET_BYTES, exchange_seconds
from samestep.errors import PlanError
from samestep.foreign.limits import short

GOAL = 0.9
"""The efficiency that lanes are chosen for."""
_MOST_LANES = 64
_LEAST_BUCKET = 1 << 20
_LINK = re.compile(r"([0-9.]{1,9})\s*(MB|GB)/s\s*,\s*([0-9.]{1,9})\s*(us|ms)", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
_RATES, _TIMES = {"MB": 1e6, "GB": 1e9}, {"us": 1e-6, "ms": 1e-3}


def parse_link(text: str) -> Link:
    """From `25GB/s,5us`: what each rank sends in a second, and what the shortest message takes.

    Raises:
        PlanError: for anything else.
    """
    found = _LINK.fullmatch(text.strip())
    numbers = [] if found is None else [found[1], found[3]]
    if found is None or not all(_NUMBER.fullmatch(n) and float(n) > 0 for n in numbers):
        raise PlanError(
            f"--link is {short(repr(text))}: give a bandwidth and a latency, such as 25GB/s,5us"
        )
    return Link(
        float(found[3]) * _TIMES[found[4].lower()], float(found[1]) * _RATES[found[2].upper()]
    )


@dataclass(frozen=True)
class Advice:
    """What to choose for a number of ranks over a given link."""

    lanes_of_rank: int
    """Lanes that a rank adds up before the ranks exchange: accumulation."""
    bucket_bytes: int
    """Of what is sent at once, where latency and the last bucket, which nothing hides, cost least."""
    exchange: float
    """Seconds, in buckets as they are."""
    exposed: Spread
    """What of it is not hidden: if the backward pass hides what it can; up to all of it."""
    step: Spread
    efficiency: Spread
    reaches_goal: bool


def advise(link: Link, world: int, lane: float, update: float, size: int) -> Advice:
    """The fewest lanes of a rank with which a step wastes little, and the best bucket.

    Args:
        link: A message between two ranks.
        world: The number of ranks.
        lane: Seconds of a lane, as measured.
        update: Seconds of the update.
        size: Bytes of all gradients.
    """
    whole = exchange_seconds(link, world, size)
    exposed = exposed_seconds(link, world, lane, size)
    # exposed / (exposed + lanes * lane + update) <= 1 - GOAL
    needed = (exposed * GOAL / (1 - GOAL) - update) / lane
    # A number that is whole but for rounding must not become the next one.
    lanes = min(_MOST_LANES, max(1, math.ceil(needed - 1e-9)))
    work = lanes * lane + update
    step = Spread(work + exposed, work + exposed, work + whole)
    efficiency = Spread(work / step.median, work / step.high, work / step.low)
    return Advice(
        lanes_of_rank=lanes,
        bucket_bytes=best_bucket(link, world, size),
        exchange=whole,
        exposed=Spread(exposed, exposed, whole),
        step=step,
        efficiency=efficiency,
        reaches_goal=efficiency.median >= GOAL - 1e-9,
    )


def exposed_seconds(link: Link, world: int, lane: float, size: int) -> float:
    """What the backward pass of a rank's last lane cannot hide; at least the last bucket."""
    whole = exchange_seconds(link, world, size)
    last = exchange_seconds(link, world, min(size, BUCKET_BYTES))
    return max(last, whole - BACKWARD * lane)


def best_bucket(link: Link, world: int, size: int) -> int:
    """Bytes of a bucket b for which `latency * size / b + b / world / bandwidth` is least."""
    found = math.sqrt(size * link.latency * world * link.bandwidth)
    return round(min(size, max(_LEAST_BUCKET, found))) if size > _LEAST_BUCKET else size
