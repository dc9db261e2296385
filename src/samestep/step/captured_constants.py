"""Values that a CUDA graph holds as they were when it was captured, though Python code may change them.

A replay runs no Python: a number that the loss reads from its task, its closure, a module or an
optimizer's group stays what it was. All of them that can be found are compared before each replay.
What is inside of other objects, such as lists, is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_READ_EACH_TIME = ("params", "lr", "initial_lr")
"""What of an optimizer's group a graph does not hold: rates are on the device."""


class _Constant(NamedTuple):
    holder: dict[str, Any]
    name: str
    value: Any
    label: str

    def has_changed(self) -> bool:
        now = self.holder.get(self.name)
        if now is self.value:
            return False
        return not (isinstance(now, _PLAIN) and type(now) is type(self.value) and now == self.value)


class CapturedConstants:
    """Values that were read while a step was captured."""

    def __init__(self) -> None:
        self._held: list[_Constant] = []
        self._closure: list[tuple[Any, Any, str]] = []

    @classmethod
    def of_loss(cls, loss: Callable[..., Any], modules: Sequence[nn.Module]) -> CapturedConstants:
        """Return what a loss can read: from modules, its closure, and the object it is a method of."""
        values = cls()
        values._held += _of_modules(modules)
        function, owner = _function(loss)
        if owner is not None:
            attributes = vars(owner) if hasattr(owner, "__dict__") else {}
            values._held += _of(attributes, type(owner).__name__, tuple(attributes))
        code = getattr(function, "__code__", None)
        if code is not None:
            names = [name for name in code.co_names if name in function.__globals__]
            numbers = _of(function.__globals__, function.__module__, names)
            values._held += [held for held in numbers if isinstance(held.value, _PLAIN)]
            cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
            values._closure += [(cell, _content(cell), name) for name, cell in cells]
        return values

    @classmethod
    def of_optimizers(cls, optimizers: Sequence[Optimizer]) -> CapturedConstants:
        """Return what optimizers read from their groups, but for the rates, which are on the device."""
        values = cls()
        values._held += _of_groups(optimizers)
        return values

    def changed(self) -> str | None:
        """Return the name of a value that is not what it was; None if all are."""
        for held in self._held:
            if held.holder.get(held.name) is not held.value and held.has_changed():
                return held.label
        for cell, value, name in self._closure:
            now = _content(cell)
            if now is not value and not (isinstance(now, _PLAIN) and now == value):
                return f"{name} (which the loss function refers to)"
        return None

    def put_back(self) -> None:
        """Make all values what they were."""
        for held in self._held:
            held.holder[held.name] = held.value
        for cell, value, _ in self._closure:
            if _content(cell) is not value:
                cell.cell_contents = value


def loss_code(loss: Callable[..., Any]) -> tuple[Any, int]:
    """Return what tells a loss from another one; a lambda that is made anew in every step is the same."""
    function, owner = _function(loss)
    return getattr(function, "__code__", function), id(owner)


def _function(loss: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the plain function of a loss, and the object it is a method of."""
    while isinstance(loss, partial):
        loss = loss.func
    return getattr(loss, "__func__", loss), getattr(loss, "__self__", None)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _of(holder: dict[str, Any], label: str, names: Iterable[str]) -> list[_Constant]:
    return [_Constant(holder, name, holder[name], f"{label}.{name}") for name in names]


def _of_modules(modules: Sequence[nn.Module]) -> Iterator[_Constant]:
    for root in modules:
        for path, module in root.named_modules():
            label = f"{type(root).__name__}.{path}" if path else type(root).__name__
            attributes = vars(module)
            names = [name for name in attributes if not name.startswith("_")]
            yield from _of(attributes, label, names)


def _of_groups(optimizers: Sequence[Optimizer]) -> Iterator[_Constant]:
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            names = [name for name in group if name not in _READ_EACH_TIME]
            yield from _of(group, f"{type(optimizer).__name__}'s group {number}", names)
