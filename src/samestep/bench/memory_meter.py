"""Counts the bytes that tensors hold on this rank's device: now, at most, and in the parts of a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.data.batch import LaneBatch
from samestep.pytree import tensors
from samestep.tracking.listeners import RunListener


def bytes_of(found: Sequence[Tensor]) -> int:
    """Return the bytes of tensors, each memory once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}
    return sum(storages.values())


@contextmanager
def metered(device: torch.device) -> Iterator[TensorMeter | AllocatorMeter]:
    """A meter of a device."""
    if device.type == "cuda":
        yield AllocatorMeter(device)
        return
    meter = TensorMeter()
    with meter:
        yield meter


class AllocatorMeter:
    """Reads the counts of CUDA's allocator, as `TensorMeter` counts on CPUs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        _open_workspaces(device)
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_allocated(device)
        self.restart()

    def held(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def size_of(self, batch: Any) -> int:
        return sum(tensor.nbytes for tensor in tensors(batch))

    def resized(self, tensor: Tensor) -> None:
        """Do nothing: the allocator has seen it."""


def _open_workspaces(device: torch.device) -> None:
    """Let cuBLAS take its workspaces, of this thread and of autograd's: they are no training's."""
    layer = torch.nn.Linear(16, 16, device=device)
    layer(torch.ones(16, 16, device=device)).sum().backward()


class TensorMeter(TorchDispatchMode):
    """Sees every operation, and counts the memory of what is new in its results.

    The allocator of the CPU counts nothing, and the memory of a process has much else in it. What a
    kernel holds while it runs is not seen; what is there before the meter is, counts for nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}
        """By the address of a storage that is alive."""
        self._held = self._peak = 0

    def held(self) -> int:
        """Bytes of all tensors that are alive."""
        return self._held

    def peak(self) -> int:
        """Return the most that `held` was since `restart`."""
        return self._peak

    def restart(self) -> None:
        """Look for a new peak."""
        self._peak = self._held

    def size_of(self, batch: Any) -> int:
        """Return what of `held` is a batch's, once it is where this rank computes."""
        storages = {tensor.untyped_storage()._cdata for tensor in tensors(batch)}
        return sum(self._sizes.get(storage, 0) for storage in storages)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in tensors((args, kwargs)):
            self._see(tensor, counts=False)
        found = func(*args, **(kwargs or {}))
        for tensor in tensors(found):
            self._see(tensor, counts=True)
        return found

    def resized(self, tensor: Tensor) -> None:
        """The storage of a tensor has another size now."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._sizes:
            self._held += storage.nbytes() - self._sizes[storage._cdata]
            self._sizes[storage._cdata] = storage.nbytes()
            self._peak = max(self._peak, self._held)

    def _see(self, tensor: Tensor, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = storage.nbytes() if counts else 0
        self._sizes[key] = size
        self._held += size
        self._peak = max(self._peak, self._held)
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self._held -= self._sizes.pop(key, 0)


@dataclass
class StepMemory:
    """Bytes that were held in a step, less those of its batches."""

    before_forward: list[int] = field(default_factory=list)
    """When each lane's forward pass began."""
    after_forward: list[int] = field(default_factory=list)
    """When each lane's forward pass was over."""
    end: int = 0
    """After the last lane's backward pass."""
    batches: int = 0
    peak: int = 0
    """With the batches."""

    @property
    def activations(self) -> int:
        """The most that a lane's forward pass kept."""
        pairs = zip(self.before_forward, self.after_forward, strict=True)
        return max((turn - begin for begin, turn in pairs), default=0)

    def gradients(self, by_tree: bool) -> int:
        """Return what lanes left, and the last one's own where those before it are kept apart.

        Args:
            by_tree: Whether a lane's gradients are added when it is over, not while they come.
        """
        if not self.before_forward:
            return 0
        left = [level - self.before_forward[0] for level in (*self.before_forward[1:], self.end)]
        if len(self.before_forward) == 1 or not by_tree:
            return max(left)
        return max(left[:-1]) + left[0]


class MemorySampler(RunListener):
    """Watches the lanes of a run's steps: a `LaneWatch`, and a listener for their batches."""

    draws = False

    def __init__(self, meter: TensorMeter | AllocatorMeter, copies: bool) -> None:
        """Args:
        copies: Whether a batch is on the device only when its lane's forward pass has begun.
        """
        self._meter, self._copies = meter, copies
        self.step = StepMemory()
        self._sizes: list[int] = []

    def begin(self) -> None:
        """A new step."""
        self.step, self._sizes = StepMemory(), []
        self._meter.restart()

    def on_batch(self, step: int, batch: LaneBatch) -> None:
        self._sizes.append(self._meter.size_of(batch.data))

    def enter_lane(self, step: int, lane: int) -> None:
        copied = self._sizes[:-1] if self._copies else self._sizes
        self.step.before_forward.append(self._meter.held() - sum(copied))

    def forget_lane(self) -> None:
        self.step.before_forward.pop()
        self.step.before_forward.append(self._meter.held() - sum(self._sizes))

    def leave_lane(self, loss: Tensor | float, count: Tensor | float) -> None:
        self.step.after_forward.append(self._meter.held() - sum(self._sizes))

    def leave_lanes(self) -> None:
        self.step.end = self._meter.held() - sum(self._sizes)

    def summed(self, step: int) -> None:
        pass

    def finished(self) -> StepMemory:
        """Return what the step took, which is over."""
        self.step.batches, self.step.peak = sum(self._sizes), self._meter.peak()
        return self.step
