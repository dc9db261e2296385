"""The weights that are gathered together (`distributed.shard: weights`): blocks of the model, and the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn import Parameter

from samestep.errors import TaskError

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
    return _matching(model, patterns) if patterns else _found(model)


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


def _matching(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in modules):
            known = ", ".join(name for name in modules if "." not in name)
            raise TaskError(
                f"distributed.shard_blocks: {pattern!r} matches no module; the model has {known}, and what is "
                "inside of them"
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
