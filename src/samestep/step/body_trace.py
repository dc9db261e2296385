"""Records the operations of a loop's body up to its backward pass, so that they can be run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.data.batch import LaneBatch
from samestep.pytree import leaves, map_leaves
from samestep.step.lane_tensor import LaneTensor
from samestep.step.loss_terms import LossValue

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)

Run = Callable[[Any, Any], Any]
"""Runs an operation eagerly, with its arguments."""


class Place(NamedTuple):
    """The origin of a value: the index of a leaf in an operation's result, or in the batch (-1)."""

    operation: int
    leaf: int


class State(NamedTuple):
    """The modes that an operation runs under, besides its arguments."""

    grad: bool
    autocast: torch.dtype | None

    @contextmanager
    def entered(self, kind: str) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.autocast is not None:
                stack.enter_context(torch.autocast(kind, self.autocast))
            yield


class Operation(NamedTuple):
    function: Any
    args: Any
    """With places where the body had values of lanes."""
    state: State
    result: Any
    """With places, and plain values."""


@dataclass(eq=False)
class BodyTrace:
    """The operations of a body up to a backward pass."""

    kind: str
    """Kind of the device."""
    operations: list[Operation] = field(default_factory=list)
    loss: Any = None
    """With places."""
    kept: tuple[Place, ...] = ()
    """Values that the body still held when it called the backward pass."""
    values: dict[int, list[Tensor]] = field(default_factory=dict)
    """By lane, those of the last pass."""
    times: int = 1

    def loss_of(self, batch: LaneBatch) -> LossValue:
        """Return the loss of one lane: what a step is captured from."""
        found: dict[Place, Any] = dict(places_of(-1, leaves(batch.data)))
        for number, operation in enumerate(self.operations):
            args, kwargs = filled(operation.args, found)
            with operation.state.entered(self.kind):
                result = operation.function(*args, **kwargs)
            found |= places_of(number, leaves(result))
        self.values[batch.lane] = [found[place].detach() for place in self.kept]
        value: LossValue = filled(self.loss, found)
        return value

    def does(self, other: BodyTrace) -> bool:
        """Return whether the other one does the same, and no less is kept."""
        alike = len(self.operations) == len(other.operations) and all(
            is_same(one, two) for one, two in zip(self.operations, other.operations, strict=True)
        )
        return alike and is_same(self.loss, other.loss) and set(other.kept) <= set(self.kept)


def places_of(operation: int, found: Sequence[Any]) -> list[tuple[Place, Any]]:
    return [(Place(operation, leaf), value) for leaf, value in enumerate(found)]


def filled(data: Any, values: Mapping[Place, Any]) -> Any:
    """Return the arguments with values in place of their places."""

    def value(leaf: Any) -> Any:
        if type(leaf) is Place:
            return values[leaf]
        if type(leaf) is slice:
            return slice(*filled((leaf.start, leaf.stop, leaf.step), values))
        return leaf

    return map_leaves(value, data, is_place)


def is_same(one: Any, two: Any) -> bool:
    """Return whether arguments are alike: tensors and objects the same, numbers equal."""
    kind = type(one)
    if kind is not type(two):
        return False
    if isinstance(one, Tensor):
        return one is two
    if kind in (tuple, list, Operation, State):
        return len(one) == len(two) and all(map(is_same, one, two))
    if kind is dict:
        return one.keys() == two.keys() and all(is_same(one[key], two[key]) for key in one)
    if kind is slice:
        return is_same((one.start, one.stop, one.step), (two.start, two.stop, two.step))
    # A property's getter is made anew each time, and equal.
    return one is two or ((isinstance(one, (*_PLAIN, Place)) or callable(one)) and one == two)


def with_places(data: Any) -> Any:
    """Return the arguments with places in place of values of lanes."""

    def place(leaf: Any) -> Any:
        if type(leaf) is LaneTensor:
            return leaf.place
        if type(leaf) is slice:
            return slice(*with_places((leaf.start, leaf.stop, leaf.step)))
        return leaf

    return map_leaves(place, data)


def is_place(node: Any) -> bool:
    return type(node) is Place
