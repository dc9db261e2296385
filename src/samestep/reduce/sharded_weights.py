"""Weights that ranks hold only while they need them (`distributed.shard: weights`).

A rank holds its own parameters all the time, and other owners' weights of a unit (a block of the model, or
what is in no block) from shortly before its forward pass to its end, and again for its backward pass. The
weights of one unit and owner lie side by side in one storage, which is sent as it is, and resized to nothing
when it is not needed: what autograd has saved is valid again when it is gathered again. In between, others'
parameters read as NaN.

All ranks that run a model's pass gather the same units in the same order, which is checked: with the first
rank's where it is not known, and after that with the order of the pass before, in which units are also gathered
ahead. A rank without a batch *follows*: the first of the others tells it which units to send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samestep.distributed.collectives import TorchCollectives
from samestep.errors import TaskError
from samestep.pytree import leaves
from samestep.reduce.exchange import Pending, receive, send, start_exchange
from samestep.reduce.owners import Owners
from samestep.reduce.weight_units import Unit, UnitWeights

_COMMANDS, _WEIGHTS = 2, 3
"""Tags of messages; a unit's number is added to that of weights."""
_OPEN, _START, _BUCKET, _END, _ABANDON = range(5)
"""Commands to ranks without a batch."""
_OVERLAP = (
    "distributed.shard: weights: a loop over run.eval_batches was left before its end, or two of them run at once. All ranks "
    "gather weights for each of its batches: read it to its end, one loop after the other"
)
TRAINING, BACKWARD, EVALUATION = "training", "backward", "evaluation"
"""Kinds of passes: forward and backward of a lane, backward alone, forward alone."""


class ShardedWeights:
    """The weights of a run's trained parameters, gathered unit by unit."""

    def __init__(
        self, units: Sequence[Unit], owners: Owners, collectives: TorchCollectives, device: torch.device
    ) -> None:
        self.units, self.owners = units, owners
        self._collectives = collectives
        # nccl has no tags, and one queue per group. Commands are read by the host.
        collectives.open_groups({"weights": "nccl", "gradients": "nccl", "commands": "gloo"})
        self._held = [
            UnitWeights(unit, owners, collectives, device, _WEIGHTS + number) for number, unit in enumerate(units)
        ]
        self._root = len(units) - 1
        self._busy: Sequence[int] | None = None
        """The ranks that run the pass; None between passes."""
        self._ahead: int | None = None
        """The unit that is on its way."""
        self._opened: list[int] = []
        """The units that this pass has needed so far, in this order."""
        self._expected: list[int] = []
        """Those of the last pass of its kind."""
        self._is_checked = True
        """Whether the order is compared with the first rank's. An evaluation's may change from one to the next."""
        self._orders: dict[str, list[int]] = {}
        self._kind = TRAINING
        self._went_back: set[int] = set()
        """Units that the backward pass has reached."""
        self._told: list[Pending] = []
        for number, unit in enumerate(units):
            if unit.module is not None:
                unit.module.register_forward_pre_hook(self._before_forward(number))
                unit.module.register_forward_hook(self._after_forward(number))
                self.guard(unit.module)

    @property
    def most_gathered(self) -> int:
        """Bytes of weights that a rank holds at most: what is in no block, and two blocks."""
        *blocks, rest = [sum(param.nbytes for _, param in unit.params) for unit in self.units]
        return rest + sum(sorted(blocks)[-2:])

    def watch_memory(self, resized: Callable[[Tensor], None]) -> None:
        """Let a function be called with memory that others' weights are gathered into, now and when its size changes."""
        for held in self._held:
            held.watch_memory(resized)

    # -- a pass ----------------------------------------------------------------------------

    def begin_pass(self, kind: str, busy: Sequence[int]) -> None:
        """Begin a pass of this rank.

        Args:
            kind: Passes of one kind need units in one order.
            busy: The ranks that run it, this one among them; the same on every rank.
        """
        self._begin(kind, busy)
        self._open(self._root)

    def abandon_pass(self) -> None:
        """A loop has left its pass: ranks that take part in it end with an error, and so does the next pass."""
        self._tell(_ABANDON, 0)

    def _begin(self, kind: str, busy: Sequence[int]) -> None:
        if self._busy is not None:
            raise TaskError(_OVERLAP)
        self._busy, self._kind = busy, kind
        self._opened, self._expected = [], self._orders.get(kind, [])
        self._is_checked = kind != TRAINING or not self._expected
        self._went_back.clear()

    def end_pass(self) -> None:
        """End this rank's pass: free all weights of others."""
        with self._collectives.activity.waiting("the end of a pass"):
            if self._ahead is not None:
                self._held[self._ahead].arrive()
                self._ahead = None
            self._check(_END, len(self.units))
            for pending in self._told:
                pending.wait()
        self._told.clear()
        for number in range(len(self.units)):
            self.close(number)
        self._orders[self._kind], self._busy = self._opened, None

    def follow(self, kind: str, busy: Sequence[int], on_bucket: Callable[[int], None] = lambda number: None) -> None:
        """Take part in a pass of other ranks: send this rank's weights to them.

        Args:
            kind: What the others call it.
            busy: The ranks that run it.
            on_bucket: Called with the number of a bucket of gradients that they send.
        """
        self._begin(kind, busy)
        with self._collectives.activity.waiting("a pass of other ranks"):
            while True:
                what, number = self._listen(busy[0])
                if what == _END:
                    break
                if what == _ABANDON:
                    raise TaskError(_OVERLAP)
                if what == _OPEN:
                    self._opened.append(number)
                elif what == _START:
                    self._held[number].leave(busy)
                else:
                    on_bucket(number)
            for held in self._held:
                held.arrive()
        self._orders[kind], self._busy = self._opened, None

    def announce_bucket(self, number: int) -> None:
        """Tell ranks without a batch that a bucket of gradients leaves for its owners."""
        self._tell(_BUCKET, number)

    def _tell(self, what: int, number: int, everyone: bool = False) -> None:
        """Send, as the first rank of a pass, what happens to ranks without a batch, or to all others."""
        busy = self._busy
        assert busy is not None, "sent inside of a pass"
        if busy[0] != self.owners.rank:
            return
        others = [r for r in range(self.owners.world) if r not in busy or (everyone and r != busy[0])]
        if others:
            command = torch.tensor([what, number])
            messages = send((rank, command) for rank in others)
            group = self._collectives.group("commands")
            self._told.append(start_exchange(messages, _COMMANDS, group))

    def _listen(self, rank: int) -> tuple[int, int]:
        command, group = torch.zeros(2, dtype=torch.int64), self._collectives.group("commands")
        with self._collectives.activity.waiting("the order of blocks"):
            start_exchange(receive([(rank, command)]), _COMMANDS, group).wait()
        what, number = command.tolist()
        return what, number

    def _check(self, what: int, number: int) -> None:
        """Compare what this rank needs next, or that it needs nothing more, with the other ranks."""
        self._tell(what, number, everyone=self._is_checked)
        busy, at = self._busy, len(self._opened)
        assert busy is not None, "compared inside of a pass"
        expected = number
        if not self._is_checked:
            expected = [*self._expected, len(self.units)][min(at, len(self._expected))]
        elif self.owners.rank != busy[0]:
            expected = self._listen(busy[0])[1]
        if expected != number:
            names = [*(unit.name for unit in self.units), "nothing more"]
            raise TaskError(
                f"distributed.shard: weights: a lane needs {names[number]} where another one needed {names[expected]}. "
                "Lanes must run the same blocks in the same order, since their weights are gathered for all of them "
                "at once: name a module around them in distributed.shard_blocks, or set shard: optimizer"
            )

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
            found = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
            if not found and torch.is_grad_enabled():
                raise TaskError(
                    f"distributed.shard: weights: {self.units[number].name} returns a {type(output).__name__} in which no "
                    "tensor was found, so its backward pass would not be noticed. Return tensors, in containers or a "
                    "dataclass, or name a module around it in distributed.shard_blocks"
                )
            self._went_back.discard(number)  # an earlier pass within this one, as for a gradient penalty
            for tensor in found:
                if tensor.requires_grad:
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
        self._check(_OPEN, number)
        self._opened.append(number)
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
        # Autocast's copies of them stay until the pass leaves autocast: a weight that is used again must be the
        # same node of the graph, or its gradients would be added in another type.
        self._held[number].free()

    # -- the whole model -------------------------------------------------------------------

    _is_whole = False
    """Whether this rank has all weights."""
    _is_gathered = False
    """Whether some rank has."""

    def guard(self, module: nn.Module) -> None:
        """Refuse `state_dict()` of a module outside of `run.whole_state()`, and its use between passes: NaN is there."""
        module.register_state_dict_pre_hook(self._refuse_part)
        if any(param.requires_grad for param in module.parameters()):
            module.register_forward_pre_hook(self._refuse_outside)

    def _refuse_outside(self, module: nn.Module, args: Any) -> None:
        if self._busy is None and not self._is_whole:
            raise TaskError(
                f"distributed.shard: weights: {type(module).__name__} ran outside of a training step or an evaluation. "
                "Other ranks own some of its weights and must take part: set shard: optimizer"
            )

    def _refuse_part(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        # What asks for the parameters themselves, as our averages do, looks which of them are here.
        if not keep_vars and not self._is_gathered:
            raise TaskError(
                f"state_dict() of {type(module).__name__}: with distributed.shard: weights this rank holds only some of "
                "its weights. Call it on rank 0 inside `with run.whole_state():`, which every rank enters"
            )

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """Let `state_dict()` be called in this block, whose weights of other ranks are NaN."""
        self._is_gathered = True
        try:
            yield
        finally:
            self._is_gathered = False

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
        self._is_whole, self._is_gathered = is_main, True
        try:
            yield
        finally:
            self._is_whole = self._is_gathered = False
            for held in self._held if is_main else ():
                held.put_back()

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Let every rank have all weights in this block, on its device. Every rank enters it, and changes them alike."""
        with self._collectives.activity.waiting("all weights"):
            for held in self._held:
                held.leave(range(self.owners.world))
                held.arrive()
        self._is_whole = self._is_gathered = True
        try:
            yield
        finally:
            self._is_whole = self._is_gathered = False
            for held in self._held:
                held.free()
        self.changed()

    def changed(self) -> None:
        """This rank has changed its weights."""
        for held in self._held:
            held.is_stale = True
