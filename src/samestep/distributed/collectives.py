"""The exchange of values between ranks: one interface, two implementations.

`SoloCollectives` is a world of one: nothing is sent, and no caller needs to check how many
ranks there are. `TorchCollectives` uses the default process group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.distributed.health.activity import Activity
from samestep.distributed.objects import packed, unpacked
from samestep.environment.secret import Signer

T = TypeVar("T")


class Collectives(ABC):
    """Every rank makes the same calls in the same order."""

    rank: int
    world: int

    def __init__(self, activity: Activity) -> None:
        self.activity = activity

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here."""

    @abstractmethod
    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the source rank's object, on every rank."""

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """Return every rank's object, in rank order, on every rank."""

    @abstractmethod
    def collect(self, value: T) -> list[T]:
        """Return every rank's object, in rank order, on rank 0; nothing on the others."""

    @abstractmethod
    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors with rank 0's."""

    def wire(self, device: torch.device) -> torch.device:
        """Return the device from which tensors of this device can be sent."""
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
    """Return whether this process is a rank of a process group, opened by us or by the caller."""
    return dist.is_available() and dist.is_initialized()


class TorchCollectives(Collectives):
    """Over the default process group."""

    def __init__(
        self, device: torch.device, activity: Activity, signer: Signer | None = None, timeout: timedelta | None = None
    ) -> None:
        super().__init__(activity)
        self._timeout = timeout
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.device = device
        self.backend = str(dist.get_backend())
        self._host_only = self.backend == "gloo"
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._wire, self._signer = self.wire(device), signer

    def wire(self, device: torch.device) -> torch.device:
        if self._host_only:
            return torch.device("cpu")
        return self.device if device.type == "cpu" else device

    def open_groups(self, backends: Mapping[str, str]) -> None:
        """Open process groups for messages that must not wait for each other. Every rank calls it.

        Args:
            backends: The backend of each kind of messages. gloo needs no groups: it has tags.
        """
        if self.device.type != "cuda" or "nccl" not in self.backend:
            return
        for name, backend in backends.items():
            if name not in self._groups:
                group = self._groups[name] = dist.new_group(backend=backend, timeout=self._timeout)
                # With all ranks: some may have nothing to send in the first exchange.
                device = self.device if backend == "nccl" else torch.device("cpu")
                dist.all_reduce(torch.zeros(1, device=device), group=group)

    def group(self, name: str) -> dist.ProcessGroup:
        """Return the process group of a kind of messages, which may be the default one."""
        found = self._groups.get(name, dist.group.WORLD)
        assert found is not None, "ranks exchange while their group is open"
        return found

    def close_groups(self, destroys: bool) -> None:
        """Let go of these groups, and destroy them if the default one, with which they end, stays open."""
        while self._groups:
            _, group = self._groups.popitem()
            if destroys:
                dist.destroy_process_group(group)

    def barrier(self) -> None:
        with self.activity.waiting("barrier"):
            dist.barrier()

    def broadcast(self, value: T, source: int = 0) -> T:
        with self.activity.waiting("broadcast"):
            mine = self._packed(value) if self.rank == source else self._bytes(0)
            size = torch.tensor([mine.numel()], device=self._wire)
            dist.broadcast(size, src=source)
            sent = mine if self.rank == source else self._bytes(int(size))
            dist.broadcast(sent, src=source)
            return value if self.rank == source else self._unpacked(sent)

    def gather(self, value: T) -> list[T]:
        with self.activity.waiting("gather"):
            padded, sizes = self._padded(value)
            received = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(received, padded)
            # This rank's own as well: its caller may change what it gave.
            return [self._unpacked(data[:size]) for data, size in zip(received, sizes, strict=True)]

    def collect(self, value: T) -> list[T]:
        with self.activity.waiting("collecting"):
            padded, sizes = self._padded(value)
            received = [torch.empty_like(padded) for _ in sizes] if self.rank == 0 else []
            dist.gather(padded, received or None, dst=0)
            return [self._unpacked(data[:size]) for data, size in zip(received, sizes, strict=False)]

    def _padded(self, value: object) -> tuple[Tensor, list[int]]:
        """This rank's object in as many bytes as the largest one, and the sizes of all."""
        mine = self._packed(value)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._wire) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([mine.numel()], device=self._wire))
        numbers = [int(size) for size in sizes]
        padded = self._bytes(max(numbers))
        padded[: mine.numel()] = mine
        return padded, numbers

    def _packed(self, value: object) -> Tensor:
        return torch.frombuffer(bytearray(packed(value, self._signer)), dtype=torch.uint8).to(self._wire)

    def _unpacked(self, data: Tensor) -> Any:
        return unpacked(data.cpu().numpy().tobytes(), self._signer)

    def _bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._wire)

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        with self.activity.waiting("broadcast of tensors"), torch.no_grad():
            for tensor in tensors:
                sent = tensor.detach()
                if not self._host_only:  # nccl sends what is on the GPU, and contiguous
                    sent = sent.to(self.device).contiguous()
                dist.broadcast(sent, src=0)
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.copy_(sent)

    def all_gather(self, output: Tensor, piece: Tensor, name: str) -> dist.Work:
        """Start bringing every rank's piece into one tensor, in rank order; does not wait."""
        # torch renamed this call in 2.13.
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self.activity.waiting(name):
            work: dist.Work | None = call(output, piece, async_op=True)
        assert work is not None, "this rank is not in the group"
        return work
