"""Collectives of one size after the other, to be timed: what each moves, and how it is called."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.distributed.collectives import TorchCollectives

Call = Callable[[], None]
"""Makes the collective once, and waits for its end on this rank."""


class Operation(NamedTuple):
    """One kind of collective."""

    prepare: Callable[[TorchCollectives, Tensor], Call]
    """With the tensor whose bytes are its size; allocates what it needs, once."""
    share: Callable[[int], float]
    """Share of a message's bytes that each rank sends at least, by the world size.

    Bytes of the message, times this, divided by the time is the bus bandwidth: comparable among
    operations and numbers of ranks.
    """


def _all_reduce(collectives: TorchCollectives, tensor: Tensor) -> Call:
    return lambda: _wait(dist.all_reduce(tensor, async_op=True))


def _all_gather(collectives: TorchCollectives, tensor: Tensor) -> Call:
    each = tensor.numel() // collectives.world
    piece = tensor[each * collectives.rank : each * (collectives.rank + 1)].clone()
    whole = tensor[: each * collectives.world]
    return lambda: _wait(collectives.all_gather(whole, piece, "all-gather"))


def _broadcast(collectives: TorchCollectives, tensor: Tensor) -> Call:
    return lambda: _wait(dist.broadcast(tensor, src=0, async_op=True))


def _point_to_point(collectives: TorchCollectives, tensor: Tensor) -> Call:
    """Around the ring: every rank sends to the next one and receives from the one before."""
    received = torch.empty_like(tensor)
    after = (collectives.rank + 1) % collectives.world
    before = (collectives.rank - 1) % collectives.world

    def call() -> None:
        works = [dist.isend(tensor, after), dist.irecv(received, before)]
        for work in works:
            _wait(work)

    return call


OPERATIONS: Mapping[str, Operation] = {
    "all-reduce": Operation(_all_reduce, lambda world: 2 * (world - 1) / world),
    "all-gather": Operation(_all_gather, lambda world: (world - 1) / world),
    "broadcast": Operation(_broadcast, lambda world: 1.0),
    "point-to-point": Operation(_point_to_point, lambda world: 1.0),
}


def seconds_of_slowest(collectives: TorchCollectives, call: Call, times: int) -> float:
    """Return what a call takes on the rank that it takes longest on; all ranks start together."""
    collectives.barrier()
    device = collectives.wire(collectives.device)
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        call()
    synchronize(device)
    return max(collectives.gather((time.perf_counter() - began) / times))


def _wait(work: dist.Work | None) -> None:
    assert work is not None, "this rank is in the group"
    work.wait()


def synchronize(device: torch.device) -> None:
    """Wait until a device has computed what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
