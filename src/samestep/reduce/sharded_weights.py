"""Weights that ranks hold only while they need them (`distributed.shard: weights`).

A rank holds its own parameters all the time, and other owners' weights of a unit (a block of the model, or
what is in no block) from shortly before its forward pass to its end, and again for its backward pass. The
weights of one unit and owner lie side by side in one storage, which is sent as it is, and resized to nothing
when it is not needed: what autograd has saved is valid again when it is gathered again. In between, others'
parameters read as NaN.

All ranks that run a model's pass gather the same units in the same order. A rank without a batch in it
*follows*: the first of the others tells it which units to send. Units are gathered ahead in the order of the
last pass of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from samestep.distributed.collectives import TorchCollectives
from samestep.errors import TaskError
from samestep.pytree import leaves
from samestep.reduce.exchange import Pending, receive, send, start_exchange
from samestep.reduce.owners import Owners, absent
from samestep.reduce.weight_units import Unit

_ALIGN = 512
"""Bytes to which a parameter's place is rounded up, as CUDA's allocator does: kernels may depend on it."""
_WEIGHTS, _COMMANDS = 2, 3
"""Tags of messages."""
_OPEN, _START, _BUCKET, _END = range(4)
"""What a rank without a batch is told."""
TRAINING, EVALUATION = "training", "evaluation"


class ShardedWeights:
    """The weights of a run's trained parameters, gathered unit by unit."""

    def __init__(
        self,
        units: Sequence[Unit],
        owners: Owners,
        collectives: TorchCollectives,
        device: torch.device,
    ) -> None:
        """Args:
        units: Blocks, then what is in none of them.
        owners: Who owns which parameter.
        collectives: How this rank talks to the others.
        device: Where the weights of this rank go.
        """
        self.units, self.owners = units, owners
        self._collectives = collectives
        self._held = [_UnitWeights(unit, owners, collectives, device) for unit in units]
        self._root = len(units) - 1
        self._busy: Sequence[int] | None = None
        """The ranks that run the pass; None between passes."""
        self._ahead: int | None = None
        """The unit that is on its way."""
        self._opened: list[int] = []
        """The units that this pass has needed so far, in this order."""
        self._expected: list[int] = []
        """Those of the last pass of its kind."""
        self._orders: dict[str, list[int]] = {}
        self._kind = TRAINING
        self._went_back: set[int] = set()
        """Units that the backward pass has reached."""
        self._told: list[Pending] = []
        for number, unit in enumerate(units):
            if unit.module is not None:
                unit.module.register_forward_pre_hook(self._before_forward(number))
                unit.module.register_forward_hook(self._after_forward(number))

    # -- a pass ----------------------------------------------------------------------------

    def begin_pass(self, kind: str, busy: Sequence[int]) -> None:
        """Begin a pass of this rank.

        Args:
            kind: Passes of one kind need units in one order.
            busy: The ranks that run it, this one among them; the same on every rank.
        """
        assert self._busy is None, "passes do not overlap"
        self._begin(kind, busy)
        self._open(self._root)

    def _begin(self, kind: str, busy: Sequence[int]) -> None:
        self._busy, self._kind = busy, kind
        self._opened, self._expected = [], self._orders.get(kind, [])
        self._went_back.clear()

    def end_pass(self) -> None:
        """End this rank's pass: free all weights of others."""
        if self._ahead is not None:
            self._held[self._ahead].arrive()
            self._ahead = None
        for number in range(len(self.units)):
            self.close(number)
        self._tell(_END, 0)
        for pending in self._told:
            pending.wait()
        self._told.clear()
        self._orders[self._kind], self._busy = self._opened, None

    def follow(
        self, kind: str, busy: Sequence[int], on_bucket: Callable[[int], None] = lambda number: None
    ) -> None:
        """Take part in a pass of other ranks: send this rank's weights to them.

        Args:
            kind: What the others call it.
            busy: The ranks that run it.
            on_bucket: Called with the number of a bucket of gradients that they send.
        """
        self._begin(kind, busy)
        wire = self._collectives.wire(self._collectives.device)
        with self._collectives.activity.waiting("a pass of other ranks"):
            while True:
                told = torch.zeros(2, dtype=torch.int64, device=wire)
                start_exchange(receive([(busy[0], told)]), _COMMANDS).wait()
                what, number = told.tolist()
                if what == _END:
                    break
                if what == _OPEN:
                    self._opened.append(number)
                elif what == _START:
                    self._held[number].leave(busy)
                else:
                    on_bucket(number)
        for held in self._held:
            held.arrive()
        self._orders[kind], self._busy = self._opened, None

    def sent_bucket(self, number: int) -> None:
        """Tell ranks without a batch that a bucket of gradients is on its way to its owners."""
        self._tell(_BUCKET, number)

    def _tell(self, what: int, number: int) -> None:
        busy = self._busy
        assert busy is not None, "told inside of a pass"
        idle = [rank for rank in range(self.owners.world) if rank not in busy]
        if idle and busy[0] == self.owners.rank:
            wire = self._collectives.wire(self._collectives.device)
            command = torch.tensor([what, number], dtype=torch.int64, device=wire)
            self._told.append(start_exchange(send((rank, command) for rank in idle), _COMMANDS))

    # -- units -----------------------------------------------------------------------------

    def _before_forward(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if not self._is_whole:
                self._open(number)

        return hook

    def _after_forward(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._is_whole:
                return
            for tensor in leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda grad: self._before_backward(number))
            if self._next != number:  # the last block runs backward at once
                self.close(number)

        return hook

    def _before_backward(self, number: int) -> None:
        if number not in self._went_back:
            self._went_back.add(number)
            self._open(number)

    @property
    def _next(self) -> int | None:
        """The unit that is expected to be needed next."""
        at = len(self._opened)
        is_as_before = self._opened == self._expected[:at]
        return self._expected[at] if is_as_before and at < len(self._expected) else None

    def _open(self, number: int) -> None:
        """Have the weights of a unit, and start to gather those of the next."""
        if self._busy is None:
            raise TaskError(
                f"distributed.shard: weights: {self.units[number].name} ran outside of a training step or an "
                "evaluation. Other ranks own some of its weights and must take part: set shard: optimizer"
            )
        self._opened.append(number)
        self._tell(_OPEN, number)
        with self._collectives.activity.waiting(f"weights of {self.units[number].name}"):
            if self._ahead is not None and self._ahead != number:
                self._held[self._ahead].arrive()
                self.close(self._ahead)
                self._ahead = None
            if not self._held[number].is_here and self._ahead is None:
                self._start(number)
            self._held[number].arrive()
            self._ahead = None
            following = self._next
            if following is not None and not self._held[following].is_here:
                self._start(following)
                self._ahead = following

    def _start(self, number: int) -> None:
        assert self._busy is not None, "checked before"
        self._tell(_START, number)
        self._held[number].leave(self._busy)

    def close(self, number: int) -> None:
        """Free the weights of a unit that others own."""
        self._held[number].free()
        torch.clear_autocast_cache()  # it holds copies of them in a narrower type

    # -- the whole model -------------------------------------------------------------------

    _is_whole = False

    @contextmanager
    def on_main(self) -> Iterator[None]:
        """Let rank 0 have all weights in this block, others' in host memory. Every rank enters it."""
        is_main = self.owners.rank == 0
        with self._collectives.activity.waiting("all weights"):
            for held in self._held:
                held.leave([0])
                held.arrive()
                if is_main:
                    held.keep_on_host()
        self._is_whole = is_main
        try:
            yield
        finally:
            self._is_whole = False
            for held in self._held if is_main else ():
                held.put_back()

    def changed(self) -> None:
        """This rank has updated its weights."""
        for held in self._held:
            held.is_stale = True


class _UnitWeights:
    """The weights of one unit, side by side for each owner."""

    def __init__(
        self, unit: Unit, owners: Owners, collectives: TorchCollectives, device: torch.device
    ) -> None:
        self._rank = owners.rank
        self._wire = collectives.wire(device)
        self._by_owner = [
            [param for _, param in unit.params if owners.of(param) == owner]
            for owner in range(owners.world)
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
        self.is_here = not self._others
        self.is_stale = True
        """Whether the copy of this rank's weights on the wire's device is an old one."""
        self._mine = self._flats[self._rank]
        self._staged: dict[int, Tensor] = {}
        self._pending: Pending | None = None
        self._receives = False

    def leave(self, busy: Sequence[int]) -> None:
        """Send this rank's weights to the ranks that need them, and begin to receive theirs if it is one of them."""
        self.arrive()
        messages = []
        self._receives = self._rank in busy
        if self._receives:
            for owner, flat in enumerate(self._flats):
                if owner != self._rank and self._by_owner[owner]:
                    flat.untyped_storage().resize_(flat.numel())
                    place = flat
                    if flat.device.type != self._wire.type:
                        place = self._staged[owner] = torch.empty_like(flat, device=self._wire)
                    messages += receive([(owner, place)])
        if self._by_owner[self._rank]:
            others = [rank for rank in busy if rank != self._rank]
            messages += send((rank, self._on_wire()) for rank in others)
        self._pending = start_exchange(messages, _WEIGHTS)

    def _on_wire(self) -> Tensor:
        own = self._flats[self._rank]
        if self.is_stale:
            self.is_stale = False
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
        if self._others and self.is_here:
            self.is_here = False
            for param, _, nothing in self._others:
                param.data = nothing
            for owner, flat in enumerate(self._flats):
                if owner != self._rank:
                    flat.untyped_storage().resize_(0)

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
