"""Finds mistakes in the `optimizer:` section, given the optimizers that there are. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samestep.config.named_classes import Named, NamedClasses, argument_mistakes, leave_out
from samestep.config.optim import GroupConfig, OptimizerConfig
from samestep.errors import Mistake

UNUSABLE = {
    "lbfgs": "it computes the loss several times in one step",
    "sparseadam": "it needs sparse gradients, and lanes are added up as dense ones",
}
KEYS_OF_THEIR_OWN = ("params", "lr", "weight_decay", "foreach", "fused", "differentiable")


def optimizer_mistakes(section: OptimizerConfig, known: NamedClasses) -> list[Mistake]:
    """Names that are no optimizer, and arguments that one does not take; nothing about values."""
    mistakes: list[Mistake] = []
    own = _find("optimizer.name", section.name, known, mistakes)
    if own is not None:
        mistakes += _entry_mistakes("optimizer", own, section, {})
    for number, group in enumerate(section.groups):
        path = f"optimizer.groups[{number}]"
        found = own
        if group.name is not None:
            found = _find(f"{path}.name", group.name, known, mistakes)
        if found is not None:
            inherited = section.args if found is own else {}
            mistakes += _entry_mistakes(path, found, group, inherited)
    return mistakes


def _find(path: str, name: str, known: NamedClasses, mistakes: list[Mistake]) -> Named | None:
    found = known.get(name.lower())
    if found is None:
        choices = ", ".join(k.name for key, k in known.items() if key not in UNUSABLE)
        mistakes.append(Mistake(path, f"there is no optimizer {name!r}: there are {choices}"))
    elif name.lower() in UNUSABLE:
        reason = UNUSABLE[name.lower()]
        mistakes.append(Mistake(path, f"{found.name} cannot be used here: {reason}"))
        return None
    return found


def _entry_mistakes(
    path: str, kind: Named, entry: OptimizerConfig | GroupConfig, inherited: Mapping[str, Any]
) -> list[Mistake]:
    takes = leave_out(kind.takes, KEYS_OF_THEIR_OWN)
    found = argument_mistakes(f"{path}.args", kind.name, takes, {**inherited, **entry.args})
    if entry.weight_decay is not None and "weight_decay" not in kind.takes:
        found.append(Mistake(f"{path}.weight_decay", f"{kind.name} has none: remove it"))
    return found
