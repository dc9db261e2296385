"""Objects between ranks: pickled, and unpickled only if a rank of this launch signed them.

torch's own functions for objects unpickle whatever arrives, and unpickling runs code.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.environment.secret import Signer, message_of, signed


def packed(value: Any, signer: Signer | None) -> bytes:
    """Return an object as signed bytes."""
    return signed(signer, pickle.dumps(value))


def unpacked(data: bytes, signer: Signer | None) -> Any:
    """Return the object of `packed`; raises `NotAuthentic` before anything of others is unpickled."""
    return pickle.loads(message_of(signer, data))


class ObjectExchange:
    """The objects of all ranks, over the default process group.

    Args:
        signer: The same on every rank; None where the launch has no secret.
    """

    def __init__(self, device: torch.device, signer: Signer | None) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._device, self._signer = device, signer

    def broadcast(self, value: Any, source: int) -> Any:
        """Return the source rank's object, on every rank; nothing but that rank's is pickled."""
        mine = self._packed(value) if self._rank == source else self._empty(0)
        size = torch.tensor([mine.numel()], device=self._device)
        dist.broadcast(size, src=source)
        if self._rank == source:
            dist.broadcast(mine, src=source)
            return value
        received = self._empty(int(size))
        dist.broadcast(received, src=source)
        return self._unpacked(received)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's object, in rank order, on every rank."""
        padded, sizes = self._padded(value)
        received = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(received, padded)
        return self._all_unpacked(received, sizes)

    def collect(self, value: Any) -> list[Any]:
        """Return every rank's object, in rank order, on rank 0; nothing on the others."""
        padded, sizes = self._padded(value)
        received = [torch.empty_like(padded) for _ in sizes] if self._rank == 0 else None
        dist.gather(padded, received, dst=0)
        return [] if received is None else self._all_unpacked(received, sizes)

    def _padded(self, value: Any) -> tuple[Tensor, list[int]]:
        """This rank's object in as many bytes as the largest one, and the sizes of all."""
        mine = self._packed(value)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self._world)]
        dist.all_gather(sizes, torch.tensor([mine.numel()], device=self._device))
        numbers = [int(size) for size in sizes]
        padded = self._empty(max(numbers))
        padded[: mine.numel()] = mine
        return padded, numbers

    def _all_unpacked(self, received: list[Tensor], sizes: list[int]) -> list[Any]:
        # This rank's own as well: its caller may change what it gave.
        return [self._unpacked(data[:size]) for data, size in zip(received, sizes, strict=True)]

    def _packed(self, value: Any) -> Tensor:
        data = bytearray(packed(value, self._signer))
        return torch.frombuffer(data, dtype=torch.uint8).to(self._device)

    def _unpacked(self, data: Tensor) -> Any:
        return unpacked(data.cpu().numpy().tobytes(), self._signer)

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)
