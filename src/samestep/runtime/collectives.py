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
from samestep.runtime.lanestats import EMPTY, GatheredStats, LaneStats, RankNote, stack_stats
from samestep.runtime.pulse import Pulse

T = TypeVar("T")


class Collectives(ABC):
    """Every rank makes the same calls in the same order."""

    rank: int
    world: int

    def __init__(self, pulse: Pulse) -> None:
        self.pulse = pulse

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
    def collect(self, value: T) -> list[T]:
        """Every rank's object, in rank order, on rank 0; nothing on the others."""

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

    def collect(self, value: T) -> list[T]:
        return [value]

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        pass


def group_is_open() -> bool:
    """Whether this process is a rank of a process group, whoever opened it."""
    return dist.is_available() and dist.is_initialized()


class TorchCollectives(Collectives):
    """Over the default process group."""

    def __init__(self, device: torch.device, pulse: Pulse) -> None:
        super().__init__(pulse)
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self._device = device
        self._host_only = dist.get_backend() == "gloo"

    def _wire(self, device: torch.device) -> torch.device:
        return torch.device("cpu") if self._host_only else device

    def barrier(self) -> None:
        with self.pulse.waiting("barrier"):
            dist.barrier()

    def broadcast(self, value: T, source: int = 0) -> T:
        box: list[Any] = [value]
        with self.pulse.waiting("broadcast"):
            dist.broadcast_object_list(box, src=source, device=self._device)
        return box[0]  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world
        with self.pulse.waiting("gather"):
            dist.all_gather_object(values, value)
        return values

    def collect(self, value: T) -> list[T]:
        values: list[Any] | None = [None] * self.world if self.rank == 0 else None
        with self.pulse.waiting("collecting"):
            dist.gather_object(value, values, dst=0)
        return values or []

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        with self.pulse.waiting("broadcast of tensors"), torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def gather_stats(
        self, lanes: Sequence[LaneStats], note: RankNote, assignment: Sequence[range]
    ) -> GatheredStats:
        """Start telling all ranks this rank's lanes' losses and its note; does not wait."""
        most = max(map(len, assignment))
        padded: list[LaneStats | RankNote] = [*lanes, *[EMPTY] * (most - len(lanes)), note]
        mine = stack_stats(padded, self._wire(self._device)).view(-1)
        everyone = mine.new_empty(self.world * mine.numel())
        with self.pulse.waiting("losses"):
            work = all_gather_single(everyone, mine, async_op=True)
        counts = [len(held) for held in assignment]
        return GatheredStats(everyone, mine, work, counts, self.pulse)
