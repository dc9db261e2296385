"""What ranks say to each other: one contract, two implementations.

`SoloCollectives` is a world of one: nothing is sent, and nothing above needs to ask how
many ranks there are. `TorchCollectives` speaks over the default process group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.runtime.exchange import Blocks, Exchange, all_gather_single, create_exchange
from samestep.runtime.lanestats import EMPTY, GatheredStats, LaneStats, stack_stats
from samestep.runtime.peers import naming_lost_peers

T = TypeVar("T")


class Collectives(ABC):
    """Every rank makes the same calls in the same order."""

    rank: int
    world: int

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here."""

    @abstractmethod
    def broadcast(self, value: T, source: int = 0) -> T:
        """The source rank's object, on every rank."""

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """Every rank's object, in rank order, on every rank."""

    @abstractmethod
    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors with rank 0's."""

    def exchange(self, blocks: Blocks, numel: int, like: Tensor) -> Exchange:
        """A buffer whose blocks of lanes all ranks add up in the tree's order."""
        return create_exchange(blocks, self.rank, numel, like, self._wire(like.device))

    def _wire(self, device: torch.device) -> torch.device:
        """Where tensors of this device must lie to be exchanged."""
        return device


class SoloCollectives(Collectives):
    """A world of one."""

    rank = 0
    world = 1

    def barrier(self) -> None:
        pass

    def broadcast(self, value: T, source: int = 0) -> T:
        return value

    def gather(self, value: T) -> list[T]:
        return [value]

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        pass


class TorchCollectives(Collectives):
    """Over the default process group."""

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self._device = device
        self._host_only = dist.get_backend() == "gloo"

    def _wire(self, device: torch.device) -> torch.device:
        return torch.device("cpu") if self._host_only else device

    def barrier(self) -> None:
        with naming_lost_peers():
            dist.barrier()

    def broadcast(self, value: T, source: int = 0) -> T:
        box: list[Any] = [value]
        with naming_lost_peers():
            dist.broadcast_object_list(box, src=source, device=self._device)
        return box[0]  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world
        with naming_lost_peers():
            dist.all_gather_object(values, value)
        return values

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        with naming_lost_peers(), torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def gather_stats(
        self, lanes: Sequence[LaneStats], assignment: Sequence[range]
    ) -> GatheredStats:
        """Start telling all ranks this rank's lanes' losses and counts; does not wait."""
        most = max(map(len, assignment))
        padded = [*lanes, *[EMPTY] * (most - len(lanes))]
        mine = stack_stats(padded, self._wire(self._device)).view(-1)
        everyone = mine.new_empty(self.world * most * 2)
        work = all_gather_single(everyone, mine, async_op=True)
        return GatheredStats(everyone, mine, work, [len(held) for held in assignment])
