"""The buffers that a run joins over its lanes, by their place in a module, and how.

A place is a module and a name, not a tensor: `self.m = 0.9 * self.m + ...` puts another tensor there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samestep.errors import TaskError


@dataclass(frozen=True)
class Concatenate:
    """Joins a queue: what each lane wrote, one lane after the other, from the pointer on.

    Every lane writes its entries where the pointer stood before the step, and moves it on by their
    number, modulo the queue's length.

    Example:
        class MoCo(nn.Module):
            buffer_joins = {"queue": samestep.Concatenate(pointer="queue_ptr", dim=1)}
    """

    pointer: str
    """The buffer of the same module that holds the next position; an integer."""
    dim: int = 0
    """The dimension along which entries follow each other."""


Join = Literal["mean", "sum", "last"] | Concatenate
_JOINS = ("mean", "sum", "last")
DECLARATION = "buffer_joins"
"""The attribute in which a module declares how its buffers are joined."""


@dataclass(frozen=True)
class BufferSlot:
    """A place for a buffer in a module."""

    module: nn.Module
    name: str
    path: str
    """From the run's module on, such as `layers.0.running_mean`."""
    join: Join
    declared: bool

    @property
    def tensor(self) -> Tensor | None:
        return self.module._buffers[self.name]

    def put(self, tensor: Tensor) -> None:
        self.module._buffers[self.name] = tensor

    def sibling(self, name: str, slots: Sequence[BufferSlot]) -> BufferSlot:
        """Another buffer of the same module."""
        for slot in slots:
            if slot.module is self.module and slot.name == name:
                return slot
        raise TaskError(
            f"{DECLARATION} of {type(self.module).__name__}: {self.name} has the pointer {name!r}, "
            "which is no buffer of the module's state"
        )


def find_slots(modules: Sequence[nn.Module]) -> list[BufferSlot]:
    """Return the buffers of these modules that belong to their state; one place for each tensor.

    Raises:
        TaskError: A module declares a join that there is not, or one of a buffer that it has not.
    """
    found: list[BufferSlot] = []
    seen: set[int] = set()
    for number, root in enumerate(modules):
        kept = root.state_dict(keep_vars=True)
        whose = f"module {number}." if number else ""
        for prefix, module in root.named_modules():
            joins = _declared(module)
            for name, buffer in module._buffers.items():
                path = f"{prefix}.{name}" if prefix else name
                if buffer is None or path not in kept or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                join = joins.get(name, "mean")
                found.append(BufferSlot(module, name, whose + path, join, name in joins))
    return found


def _declared(module: nn.Module) -> Mapping[str, Join]:
    joins: Any = getattr(module, DECLARATION, {})
    kind = type(module).__name__
    if not isinstance(joins, Mapping):
        raise TaskError(f"{DECLARATION} of {kind} must be a mapping from buffers' names to joins")
    for name, join in joins.items():
        if name not in module._buffers:
            has = ", ".join(module._buffers) or "none"
            raise TaskError(f"{DECLARATION} of {kind} names {name!r}; its buffers are: {has}")
        if join not in _JOINS and not isinstance(join, Concatenate):
            raise TaskError(
                f"{DECLARATION} of {kind} joins {name} by {join!r}: give {', '.join(_JOINS)} or "
                "samestep.Concatenate(pointer=...)"
            )
    return joins


def current(slot: BufferSlot, own: Tensor) -> Tensor:
    """Return what a forward pass has left in a place: the tensor that was there, or another one like it."""
    tensor = slot.tensor
    if tensor is own:
        return own
    if tensor is None or tensor.shape != own.shape or not torch.can_cast(tensor.dtype, own.dtype):
        now = "None" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
        raise TaskError(
            f"buffer {slot.path} was {tuple(own.shape)} of {own.dtype} and is {now} after a lane's "
            "forward pass: lanes can only be joined if it keeps its shape and kind. Put a batch through the "
            "model before run.prepare, if its first one decides them"
        )
    return tensor


def empty_slots(modules: Sequence[nn.Module]) -> list[BufferSlot]:
    """Places of the state that hold no tensor yet."""
    return [
        BufferSlot(module, name, f"{prefix}.{name}" if prefix else name, "mean", declared=False)
        for root in modules
        for prefix, module in root.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is None and name not in module._non_persistent_buffers_set
    ]


@contextmanager
def keep_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Leave buffers as they were before: the same tensors, with the same values."""
    before = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for root in modules
        for module in root.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in before:
                module._buffers[name] = buffer
                if buffer is not None and values is not None:
                    buffer.copy_(values)
