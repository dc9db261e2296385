"""Buffers that a loss over the whole batch changes itself, such as a queue of earlier embeddings.

It is called once in a step, with the same numbers on every rank, so what it leaves in them is already
the step's: nothing is joined over lanes, which must not see it before the step is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.errors import StepError
from samestep.reduce.buffer_slots import BufferSlot, current, find_slots


class LossBuffers:
    """Keeps what a loss changes apart until the lanes are over."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Args:
        modules: The model, whose buffers are its lanes', and then those that a loss may change.
        """
        self._lanes = find_slots(modules[:1])
        self._own = [(s, s.tensor) for s in find_slots(modules[1:]) if s.tensor is not None]
        self._left: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Around the loss and its gradient: it changes copies."""
        before = [(slot, slot.tensor, _version(slot.tensor)) for slot in self._lanes]
        copies = [tensor.clone() for _, tensor in self._own]
        versions = [copy._version for copy in copies]
        for (slot, _), copy in zip(self._own, copies, strict=True):
            slot.put(copy)
        try:
            yield
            rows = list(zip(self._own, copies, versions, strict=True))
            changed = {
                (id(slot.module), slot.name)
                for (slot, _), copy, version in rows
                if slot.tensor is not copy or copy._version != version
            }
            self._left = [
                (own, current(slot, copy).detach())
                for (slot, own), copy, _ in rows
                if any((id(slot.module), name) in changed for name in _written_with(slot))
            ]
        finally:
            for slot, own in self._own:
                slot.put(own)
        for slot, tensor, version in before:
            if slot.tensor is not tensor or _version(tensor) != version:
                raise StepError(
                    f"the loss over the whole batch changed buffer {slot.path} of the model, which its "
                    "lanes change: put what the loss changes into a module of its own (extra_modules)"
                )

    @torch.no_grad()
    def put(self) -> None:
        """After the lanes: what the loss has left is the step's."""
        for own, value in self._left:
            own.copy_(value)
        self._left = []


def _written_with(slot: BufferSlot) -> tuple[str, ...]:
    """Return the buffers of its module whose new version says that this one may have changed, too."""
    if isinstance(slot.module, _BatchNorm):
        # torch's kernel moves the statistics without giving them a new version.
        return slot.name, "num_batches_tracked"
    return (slot.name,)


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else tensor._version
