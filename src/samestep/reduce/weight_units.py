"""The weights that are gathered together (`distributed.shard: weights`): blocks of the model, and the rest.

They are gathered from their owners into memory that is freed after use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from samestep.distributed.collectives import TorchCollectives
from samestep.errors import TaskError
from samestep.reduce.exchange import Pending, receive, send, start_exchange
from samestep.reduce.owners import Owners, absent

_AT_ONCE = 2
"""Blocks whose weights a rank holds at once: the one that runs, and the next."""

Named = Sequence[tuple[str, Parameter]]


@dataclass(frozen=True)
class Unit:
    """Parameters whose weights are gathered and freed together."""

    name: str
    module: nn.Module | None
    """The block; None for what is in no block, which a rank holds for a whole forward and backward pass."""
    params: Named


def cut_units(model: nn.Module, params: Named, patterns: Sequence[str]) -> list[Unit]:
    """Return the blocks in the model's order, then what is in none of them.

    Args:
        model: The model.
        params: All parameters that train, also those of other modules.
        patterns: Names of blocks; the best list of modules unless given.

    Raises:
        TaskError: A pattern matches no module.
    """
    _refuse_shared_memory(params)
    blocks = blocks_of(model, patterns)
    uses = Counter(id(param) for block in blocks.values() for param in block.parameters())
    outside = {id(p) for part in _outside(model, blocks) for p in part.parameters(recurse=False)}
    units: list[Unit] = []
    inside: set[int] = set()
    for name, block in blocks.items():
        own = {id(p) for p in block.parameters() if uses[id(p)] == 1} - outside
        held = [named for named in params if id(named[1]) in own]
        inside |= own
        if held:
            units.append(Unit(name, block, held))
    rest = [named for named in params if id(named[1]) not in inside]
    return [*units, Unit("what is in no block", None, rest)]


def blocks_of(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the blocks of a model by name: those that patterns name, or else the best list of modules.

    They follow from the model and the patterns alone, and are the same at any world size and in any mode.

    Raises:
        TaskError: A pattern matches no module.
    """
    return matching_modules(model, patterns, "distributed.shard_blocks") if patterns else _found(model)


def refuse_checkpoints_around(units: Sequence[Unit], patterns: Sequence[str]) -> None:
    """Refuse activation checkpointing of a module that contains blocks, which would run again all at once.

    Raises:
        TaskError: There is such a module.
    """
    for unit in units:
        parts = unit.name.split(".")
        around = [".".join(parts[:end]) for end in range(1, len(parts))]
        for name in around if unit.module is not None else ():
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                raise TaskError(
                    f"memory.checkpoint runs {name} again in the backward pass, with all blocks inside of it, such as "
                    f"{unit.name}, whose weights are gathered one after the other (distributed.shard: weights): "
                    "name the blocks in memory.checkpoint"
                )


def _refuse_shared_memory(params: Named) -> None:
    names: dict[int, str] = {}
    for name, param in params:
        memory = 0 if param.is_meta else param.data_ptr()
        other = names.setdefault(memory, name) if memory else name
        if other != name:
            raise TaskError(
                f"{name} and {other} are two parameters in the same memory, which distributed.shard: weights would "
                "part: let both be one nn.Parameter, or set shard: optimizer"
            )


def matching_modules(model: nn.Module, patterns: Sequence[str], key: str) -> dict[str, nn.Module]:
    """Return the modules that the patterns of a config key name; of nested ones the outermost."""
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in modules):
            known = ", ".join(name for name in modules if "." not in name)
            raise TaskError(
                f"{key}: {pattern!r} matches no module; the model has "
                + (f"{known}, and what is inside of them" if known else "none inside of it")
            )
    found = [name for name in modules if any(fnmatchcase(name, p) for p in patterns)]
    return {name: modules[name] for name in found if not any(name.startswith(f"{outer}.") for outer in found)}


def _found(model: nn.Module) -> dict[str, nn.Module]:
    """Return the children of the ModuleList or Sequential with which a rank holds the fewest weights at once."""
    total = _numel(model)
    best: dict[str, nn.Module] = {}
    least = total
    for prefix, part in model.named_modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential):
            continue
        children = {".".join(filter(None, (prefix, name))): c for name, c in part.named_children()}
        sizes = [_numel(child) for child in children.values()]
        held = total - _numel(part) + _AT_ONCE * max(sizes, default=0)
        if held < least:
            best, least = children, held
    return best


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _outside(model: nn.Module, blocks: dict[str, nn.Module]) -> Iterator[nn.Module]:
    within = {id(part) for block in blocks.values() for part in block.modules()}
    return (part for part in model.modules() if id(part) not in within)


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
