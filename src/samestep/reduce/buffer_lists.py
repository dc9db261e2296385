"""Buffers that take lanes' values as they are: the last lane's, or all of them in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.distributed.collectives import Collectives
from samestep.errors import TaskError
from samestep.reduce.buffer_slots import BufferSlot, Concatenate, current


class _Listed(NamedTuple):
    slot: BufferSlot
    own: Tensor
    pointer: BufferSlot | None
    """Pointer of a queue."""
    own_pointer: Tensor | None


class _Entry(NamedTuple):
    """The value that one lane left in one buffer."""

    lane: int
    buffer: int
    values: Tensor


class BufferLists:
    """Gathers what lanes left in some buffers, in lane order, on every rank."""

    def __init__(self, listed: Sequence[tuple[BufferSlot, BufferSlot | None]], collectives: Collectives) -> None:
        self._listed = [
            _Listed(slot, _tensor(slot), pointer, None if pointer is None else _tensor(pointer))
            for slot, pointer in listed
        ]
        self._collectives = collectives
        self._starts: list[int] = []
        self._bases: list[Tensor] = []
        self._mine: list[_Entry] = []
        self._gathered: list[_Entry] = []

    @property
    def slots(self) -> list[BufferSlot]:
        return [item.slot for item in self._listed]

    def begin_step(self) -> None:
        self._mine = []
        self._bases = [item.own.clone() for item in self._listed]
        # Read on the host, as the code that writes into a queue does, too.
        self._starts = [
            -1 if item.own_pointer is None else int(item.own_pointer) % _length(item) for item in self._listed
        ]

    def leave_lane(self, lane: int) -> None:
        for number, item in enumerate(self._listed):
            now = current(item.slot, item.own)
            if item.pointer is None or item.own_pointer is None:
                self._mine = [entry for entry in self._mine if entry.buffer != number]
                values = now
            else:
                start, length = self._starts[number], _length(item)
                end = int(current(item.pointer, item.own_pointer))
                places = _places(start, (end - start) % length, item)
                values = now.index_select(_dim(item), places)
                self._refuse_other_changes(item, now, self._bases[number], places)
            self._mine.append(_Entry(lane, number, values.detach().cpu().clone()))

    def _refuse_other_changes(self, item: _Listed, now: Tensor, base: Tensor, places: Tensor) -> None:
        rest = now.index_copy(_dim(item), places, base.index_select(_dim(item), places))
        if not torch.equal(rest, base):
            raise TaskError(
                f"buffer {item.slot.path}: a lane wrote elsewhere than into the {len(places)} places that "
                "its pointer moved by. Move the pointer by the number of entries, from where they begin; "
                "and make the queue longer than what a step writes"
            )

    def exchange(self) -> None:
        if self._listed:
            with self._collectives.activity.waiting("buffers"):
                gathered = self._collectives.gather(self._mine)
            entries = [entry for rank in gathered for entry in rank]
            self._gathered = sorted(entries, key=lambda entry: entry.lane)

    def finish(self) -> None:
        """Put the step's new buffers in place."""
        for number, item in enumerate(self._listed):
            entries = [entry.values for entry in self._gathered if entry.buffer == number]
            if not entries:
                continue
            if item.own_pointer is None:
                item.own.copy_(entries[-1])
                continue
            values = torch.cat(entries, dim=_dim(item)).to(item.own)
            count, length = values.shape[_dim(item)], _length(item)
            if count > length:
                raise TaskError(
                    f"buffer {item.slot.path} has {length} places, but the lanes of one step wrote "
                    f"{count}: make the queue at least as long as the global batch"
                )
            start = self._starts[number]
            item.own.index_copy_(_dim(item), _places(start, count, item), values)
            item.own_pointer.fill_((start + count) % length)


def _tensor(slot: BufferSlot) -> Tensor:
    tensor = slot.tensor
    assert tensor is not None, "slots are found where tensors are"
    return tensor


def _dim(item: _Listed) -> int:
    assert isinstance(item.slot.join, Concatenate)
    return item.slot.join.dim


def _length(item: _Listed) -> int:
    return item.own.shape[_dim(item)]


def _places(start: int, count: int, item: _Listed) -> Tensor:
    return (torch.arange(count, device=item.own.device) + start) % _length(item)
