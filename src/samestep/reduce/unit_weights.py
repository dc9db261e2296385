"""The weights of one unit, gathered from their owners into memory that is freed after use (`distributed.shard: weights`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.distributed.collectives import TorchCollectives
from samestep.reduce.exchange import Pending, receive, send, start_exchange
from samestep.reduce.owners import Owners, absent
from samestep.reduce.weight_units import Unit

_ALIGN = 512
"""Bytes to which a parameter's place is rounded up, as CUDA's allocator does: kernels may depend on it."""


class UnitWeights:
    """The weights of one unit, side by side for each owner."""

    def __init__(
        self, unit: Unit, owners: Owners, collectives: TorchCollectives, device: torch.device, tag: int
    ) -> None:
        self._rank, self._tag = owners.rank, tag
        self._collectives, self._wire = collectives, collectives.wire(device)
        self._by_owner = [
            [param for _, param in unit.params if owners.of(param) == owner] for owner in range(owners.world)
        ]
        self._flats: list[Tensor] = []
        self._others: list[tuple[Parameter, Tensor, Tensor]] = []
        """Parameters of other owners, where they are gathered, and what they are while they are not."""
        for owner, params in enumerate(self._by_owner):
            flat, views = _laid_out(params, device)
            self._flats.append(flat)
            pairs = list(zip(params, views, strict=True))
            if owner == self._rank:
                for param, view in pairs:
                    view.copy_(param.detach())
                    param.data = view
            else:
                self._others += [(param, view, absent(view)) for param, view in pairs]
                flat.untyped_storage().resize_(0)
        for param, _, nothing in self._others:
            param.data = nothing
        self.is_here = False
        """Whether this rank has all of them, gathered with the other ranks; also if it owns them all."""
        self.is_stale = True
        """Whether the copy of this rank's weights on the wire's device is an old one."""
        self._version = -1
        self._mine = self._flats[self._rank]
        self._staged: dict[int, Tensor] = {}
        self._pending: Pending | None = None
        self._receives = False
        self.on_resize: Callable[[Tensor], None] = lambda flat: None
        """Called when memory is taken or freed, which no operation of torch's shows."""

    def watch_memory(self, resized: Callable[[Tensor], None]) -> None:
        """Let a function be called with gathered memory, now and when its size changes."""
        self.on_resize = resized
        for flat in self._flats:
            resized(flat)

    def leave(self, busy: Sequence[int]) -> None:
        """Send this rank's weights to the ranks that need them, and begin to receive theirs if it is one of them."""
        self.arrive()
        messages = []
        self._receives = self._rank in busy
        if self._receives:
            for owner, flat in enumerate(self._flats):
                if owner != self._rank and self._by_owner[owner]:
                    flat.untyped_storage().resize_(flat.numel())
                    self.on_resize(flat)
                    place = flat
                    if flat.device.type != self._wire.type:
                        place = self._staged[owner] = torch.empty_like(flat, device=self._wire)
                    messages += receive([(owner, place)])
        if self._by_owner[self._rank]:
            others = [rank for rank in busy if rank != self._rank]
            messages += send((rank, self._on_wire()) for rank in others)
        self._pending = start_exchange(messages, self._tag, self._collectives.group("weights"))

    def _on_wire(self) -> Tensor:
        own = self._flats[self._rank]
        # Averages and users write into weights, too, without telling.
        version = sum(param._version for param in self._by_owner[self._rank])
        if self.is_stale or version != self._version:
            self.is_stale, self._version = False, version
            self._mine = own if own.device.type == self._wire.type else own.to(self._wire)
        return self._mine

    def arrive(self) -> None:
        """Wait for what has been started."""
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        if not self._receives:
            return
        for owner, place in self._staged.items():
            self._flats[owner].copy_(place)
        self._staged.clear()
        for param, view, _ in self._others:
            param.data = view
        self.is_here = True

    def free(self) -> None:
        """Free what others own."""
        if self.is_here:
            self.is_here = False
            for param, _, nothing in self._others:
                param.data = nothing
            for owner, flat in enumerate(self._flats):
                if owner != self._rank:
                    flat.untyped_storage().resize_(0)
                    self.on_resize(flat)

    def keep_on_host(self) -> None:
        """Let parameters of others be copies in host memory, until `put_back`."""
        copies = [view.to("cpu", copy=True) for _, view, _ in self._others]
        self.free()
        for (param, _, _), copy in zip(self._others, copies, strict=True):
            param.data = copy

    def put_back(self) -> None:
        """Let go of these copies."""
        for param, _, nothing in self._others:
            param.data = nothing


def _laid_out(params: Sequence[Parameter], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return one storage for parameters side by side, and the place of each in it."""
    starts = [0]
    for param in params:
        starts.append(starts[-1] + -(-param.nbytes // _ALIGN) * _ALIGN)
    flat = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
    views = []
    for start, param in zip(starts, params, strict=False):
        like = torch.empty_like(param, device="meta")
        place = flat[start : start + param.nbytes].view(param.dtype)
        views.append(place.as_strided(param.shape, like.stride(), place.storage_offset()))
    return flat, views
