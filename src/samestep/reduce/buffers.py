"""Buffers that forward changes, such as BatchNorm's statistics: joined over the lanes.

Every lane starts from the step's buffers and changes them as if it were alone. The step's new buffers
are joined from what the lanes made of them: by the mean of their changes, or as the module that holds
them declares in `buffer_joins`. Buffers that no state dict holds are taken for constants and left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from samestep.distributed.collectives import Collectives
from samestep.errors import TaskError
from samestep.pytree import same_bits
from samestep.reduce.buffer_lists import BufferLists
from samestep.reduce.buffer_slots import DECLARATION, BufferSlot, Concatenate, current, empty_slots, find_slots
from samestep.reduce.buffer_sums import BufferSums

_LARGE = 1 << 14
"""Elements of a buffer from which it is worth finding out whether it ever changes."""


def changing_buffers(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Return the buffers of these modules that belong to their state."""
    return [slot.tensor for slot in find_slots(modules) if slot.tensor is not None]


class LaneBuffers:
    """Gives every lane the step's buffers and joins what the lanes made of them."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        assignment: Sequence[range],
        collectives: Collectives,
        warn: Callable[[str], None] = lambda line: None,
        alike: Sequence[Tensor] = (),
    ) -> None:
        """Args:
        modules: Whose buffers are joined; none for a run that leaves them to something else.
        alike: Buffers that all ranks change alike: there is nothing to join.
        """
        slots = find_slots(modules)
        pairs = [(slot, slot.tensor) for slot in slots if slot.tensor is not None]
        self._empty = empty_slots(modules)
        self._modules = modules
        self._recorded: dict[int, list[Tensor]] = {}
        """By lane, what was recorded of `_joined`."""
        self._of_lanes: dict[int, list[Tensor]] = {}
        """By lane, its own of `_joined` in the body of a loop."""
        self._assignment, self._collectives, self._warn = assignment, collectives, warn
        # One lane in all changes the buffers in place: the join of one lane is that lane.
        self._alone = sum(map(len, assignment)) == 1
        self._constant: list[tuple[BufferSlot, Tensor]] = []
        """Large buffers that the first step left alone."""
        self._versions: list[int] = []
        """Versions of these when the lane began: others than lanes may write to them, such as an average."""
        self._settled = self._alone
        self._touched = False
        self._lists, pointers = _lists(slots, assignment, collectives)
        listed = {id(slot) for slot in (*self._lists.slots, *pointers)}
        self._alike = [(tensor, tensor.clone()) for tensor in alike]
        """What no lane has its own of, and its value when the step began."""
        known = {id(tensor) for tensor in alike}
        self._own = [pair for pair in pairs if id(pair[1]) not in known]
        self._summed = [pair for pair in self._own if id(pair[0]) not in listed]
        self._sums: BufferSums | None = None
        self._rebuild()

    def _rebuild(self) -> None:
        """Allocate what the buffers that change need."""
        constant = {id(slot) for slot, _ in self._constant}
        self._joined = [pair for pair in self._own if id(pair[0]) not in constant]
        self._tensors = [tensor for _, tensor in self._joined]
        self._places = self._find_places()
        self._base = [tensor.clone() for tensor in self._tensors]
        summed = [pair for pair in self._summed if id(pair[0]) not in constant]
        self._sums = None
        if summed and not self._alone:
            slots, tensors = [slot for slot, _ in summed], [tensor for _, tensor in summed]
            self._sums = BufferSums(slots, tensors, self._assignment, self._collectives)

    def begin_step(self) -> None:
        self._touched = False
        if self._tensors:
            torch._foreach_copy_(self._base, self._tensors)
        for tensor, before in self._alike:
            before.copy_(tensor)
        if self._sums is not None:
            self._sums.begin_step()
        if not self._alone:
            self._lists.begin_step()

    def enter_lane(self) -> None:
        if self._touched:
            self._put_back()
            if self._tensors:
                torch._foreach_copy_(self._tensors, self._base)
        self._touched = True
        self._see_constants()

    def _see_constants(self) -> None:
        self._versions = [own._version for _, own in self._constant]

    @torch.no_grad()
    def leave_lane(self, lane: int) -> None:
        """After the lane's forward pass: take its changes."""
        self._refuse_late_changes()
        if self._alone:
            return
        if self._sums is not None:
            self._sums.leave_lane(lane)
        self._lists.leave_lane(lane)

    def start(self) -> None:
        """After this rank's last lane: begin the exchange, behind the backward pass."""
        if self._alone:
            return
        if self._sums is not None:
            self._sums.close_lanes()
            self._sums.start()

    def wait(self) -> None:
        """End the exchange."""
        if self._sums is not None:
            self._sums.wait()
        if not self._alone:
            # Not before: it waits for all ranks, which may still need this rank's weights (`shard: weights`).
            self._lists.exchange()

    # -- lanes that are recorded as a CUDA graph -------------------------------------------

    @property
    def why_not_recorded(self) -> str | None:
        """Return what keeps lanes from being replayed; None if nothing does."""
        if self._alone or not self._lists.slots:
            return None
        slot = self._lists.slots[0]
        return f"buffer {slot.path} takes lanes' values one after the other, by way of the host"

    @contextmanager
    def beside_others(self, lane: int) -> Iterator[None]:
        """While a lane is recorded that will run beside others: it has buffers of its own."""
        if self._alone:
            yield
            return
        with self._on_copies() as copies:
            yield
            pairs = zip(self._joined, copies, strict=True)
            self._recorded[lane] = [current(slot, copy) for (slot, _), copy in pairs]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """While a lane runs forward whose backward pass comes after other lanes' forward passes.

        It changes copies, which its backward pass finds as it left them; then the buffers have their
        values.
        """
        with self._on_copies() as copies:
            yield
            pairs = zip(self._joined, copies, strict=True)
            left = [current(slot, copy) for (slot, _), copy in pairs]
        with torch.no_grad():
            for (_, own), value in zip(self._joined, left, strict=True):
                own.copy_(value)

    # -- lanes that run side by side in the body of a loop ---------------------------------

    @property
    def are_joined(self) -> bool:
        """Return whether there are buffers that lanes change each by itself."""
        return bool(self._joined) and not self._alone

    @property
    def are_watched(self) -> bool:
        """Return whether `of_lane` has something to do."""
        return self.are_joined or bool(self._constant or self._empty)

    @contextmanager
    def of_lane(self, lane: int) -> Iterator[None]:
        """While a lane's part of a forward pass runs: the buffers are the lane's own.

        They are new tensors in each step, since graphs of the last one may still hold the old ones.
        """
        self._see_constants()
        if self._alone or not self._joined:
            yield
            self._refuse_late_changes()
            return
        if lane not in self._of_lanes:
            copies = [torch.empty_like(tensor) for tensor in self._tensors]
            torch._foreach_copy_(copies, self._tensors)
            self._of_lanes[lane] = copies
        with self._placed(self._of_lanes[lane]):
            yield
            pairs = zip(self._joined, self._of_lanes[lane], strict=True)
            self._of_lanes[lane] = [current(slot, copy) for (slot, _), copy in pairs]
            self._refuse_late_changes()

    @contextmanager
    def taken(self, lane: int) -> Iterator[None]:
        """Around what a lane does last with its own buffers; then take what it has made of them."""
        with self.of_lane(lane):
            yield
        with self._placed(self._of_lanes.pop(lane, self._tensors)):
            self.leave_lane(lane)

    def forget_lanes(self) -> None:
        """Let the next forward passes begin with the joined buffers."""
        self._of_lanes.clear()

    @contextmanager
    def _on_copies(self) -> Iterator[list[Tensor]]:
        own = [tensor for _, tensor in self._joined]
        copies = [torch.empty_like(tensor) for tensor in own]
        if own:
            torch._foreach_copy_(copies, own)
        with self._placed(copies):
            yield copies

    @contextmanager
    def _placed(self, copies: Sequence[Tensor]) -> Iterator[None]:
        for buffers, name, at in self._places:
            buffers[name] = copies[at]
        try:
            yield
        finally:
            for buffers, name, at in self._places:
                buffers[name] = self._tensors[at]

    def _find_places(self) -> list[tuple[dict[str, Tensor | None], str, int]]:
        """Return where buffers are: one may be in several places, and slots know one of them."""
        at = {id(tensor): number for number, tensor in enumerate(self._tensors)}
        return [
            (module._buffers, name, at[id(tensor)])
            for root in self._modules
            for module in root.modules()
            for name, tensor in module._buffers.items()
            if tensor is not None and id(tensor) in at
        ]

    @torch.no_grad()
    def record(self) -> None:
        """After the recorded lanes: put what they add up to where the ranks exchange it."""
        lanes, self._recorded = self._recorded, {}
        if self._sums is not None:
            self._sums.record(dict(sorted(lanes.items())))

    def start_recorded(self) -> None:
        """Instead of `start`, after a replay of what was recorded."""
        if self._sums is not None:
            self._sums.start()

    # -- the end of a step -----------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> None:
        """Put the step's new buffers in place."""
        if self._alone:
            for slot, own in self._own:
                if slot.tensor is not own:
                    own.copy_(current(slot, own))
            self._put_back()
            return
        self._put_back()
        if self._lists.slots:  # else what this rank's last lane wrote would stay
            for own, base in zip(self._tensors, self._base, strict=True):
                own.copy_(base)
        if self._sums is not None:
            self._sums.finish()
        self._lists.finish()
        if not self._settled:
            self._settle()

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what the step began with, as if no lane of it had run."""
        self._put_back()
        if self._tensors:
            torch._foreach_copy_(self._tensors, self._base)
        for tensor, before in self._alike:
            tensor.copy_(before)

    def _put_back(self) -> None:
        """Put the tensor back that checkpoints and graphs know, where forward assigned another one."""
        for slot, own in self._joined:
            if slot.tensor is not own:
                slot.put(own)

    def _settle(self) -> None:
        """After the first step: leave large buffers that did not change out of all others.

        Every rank has the same buffers before and after it, and so finds the same. This waits.
        """
        self._settled = True
        if self._sums is None:
            return
        large = [(slot, own) for slot, own in self._summed if own.numel() >= _LARGE and not slot.declared]
        if not large:
            return
        bases = {id(tensor): base for tensor, base in zip(self._tensors, self._base, strict=True)}
        self._constant = [pair for pair in large if same_bits(pair[1], bases[id(pair[1])])]
        constant = {id(slot) for slot, _ in self._constant}
        for slot, own in large:
            if id(slot) not in constant and own.is_floating_point():
                self._warn(
                    f"buffer {slot.path} {tuple(own.shape)} changes in forward: it moves by the mean "
                    f"of the lanes' changes. If it is a queue or a table of counts, declare how lanes "
                    f"are joined: {type(slot.module).__name__}.{DECLARATION} = "
                    f'{{"{slot.name}": "mean"}}, or sum, last, samestep.Concatenate'
                )
        self._rebuild()

    def _refuse_late_changes(self) -> None:
        for (slot, own), version in zip(self._constant, self._versions, strict=True):
            if slot.tensor is not own or own._version != version:
                raise TaskError(
                    f"buffer {slot.path} {tuple(own.shape)} did not change in the first step and changes "
                    f"now, when lanes no longer look at it. Declare how they are joined: "
                    f'{type(slot.module).__name__}.{DECLARATION} = {{"{slot.name}": "mean"}}, or sum, '
                    "last, samestep.Concatenate"
                )
        for slot in self._empty:
            if slot.tensor is not None:
                raise TaskError(
                    f"buffer {slot.path} was None when the run was prepared and holds a tensor now: "
                    "give it its shape with register_buffer, so that lanes can be joined"
                )


def _lists(
    slots: Sequence[BufferSlot], assignment: Sequence[range], collectives: Collectives
) -> tuple[BufferLists, list[BufferSlot]]:
    """Return what takes whole values of lanes, and the pointers of its queues."""
    pointers = {
        id(slot): slot.sibling(slot.join.pointer, slots) for slot in slots if isinstance(slot.join, Concatenate)
    }
    listed = [
        (slot, pointers.get(id(slot))) for slot in slots if slot.join == "last" or isinstance(slot.join, Concatenate)
    ]
    return BufferLists(listed, collectives), list(pointers.values())
