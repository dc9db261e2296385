"""Probing a process group: whether its sums are right, and how fast."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.distributed.collectives import Collectives
from samestep.distributed.health.activity import Activity

KB = 1024
SIZES = (4 * KB, 256 * KB, 4 * KB * KB, 16 * KB * KB)
"""Bytes: from a step's losses to a bucket of gradients."""

_MOST_TIMES = 5
_SECONDS_PER_SIZE = 0.75


@dataclass(frozen=True)
class Reduced:
    """All-reduces of one size: the same on every rank, since the slowest rank's time counts."""

    size: int
    seconds: float
    wrong: tuple[int, ...]
    """Ranks that got another sum than they should."""
    bus_bytes: float
    """Bytes that every rank sends, and receives, in a second."""


def try_all_reduce(collectives: Collectives, device: torch.device, sizes: Sequence[int] = SIZES) -> list[Reduced]:
    """All-reduce every size a few times; skips sizes that a slow network leaves no time for.

    All ranks decide the same, by the slowest rank's time.
    """
    wire = torch.device("cpu") if dist.get_backend() == "gloo" else device
    found: list[Reduced] = []
    world = collectives.world
    for size in sizes:
        tensor, expected = _whole_numbers(size // 4, collectives.rank, world, wire)
        first = _timed(tensor, collectives.activity)
        results = collectives.gather((first, torch.equal(tensor, expected)))
        wrong = tuple(rank for rank, (_, right) in enumerate(results) if not right)
        slowest = max(seconds for seconds, _ in results)
        tensor.zero_()
        # The first one opens connections and touches new memory: it counts only where it must.
        times = min(_MOST_TIMES, int(_SECONDS_PER_SIZE / slowest))
        if times:
            mine = min(_timed(tensor, collectives.activity) for _ in range(times))
            slowest = max(collectives.gather(mine))
        moved = 2 * (world - 1) / world * size
        found.append(Reduced(size, slowest, wrong, moved / slowest))
        if slowest > _SECONDS_PER_SIZE:
            break
    return found


def _whole_numbers(count: int, rank: int, world: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what a rank brings and what all must get: sums that floats hold exactly in any order."""
    pattern = torch.arange(count, device=device).remainder_(251).add_(1).float()
    shares = [rank % 16 + 1 for rank in range(world)]
    return pattern * shares[rank], pattern * sum(shares)


def _timed(tensor: Tensor, activity: Activity) -> float:
    start = time.perf_counter()
    with activity.waiting("all-reduce"):
        dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
    return max(time.perf_counter() - start, 1e-9)
