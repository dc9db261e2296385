"""Autograd's graph of a tensor: what it was computed from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from samestep.errors import StepError


def refuse_kept(tensor: Tensor, made: Sequence[range]) -> None:
    """Refuse a tensor that meets values of lanes and is one lane's alone."""
    if came_from(tensor, made):
        raise StepError(
            "a tensor that a module has kept in its forward pass (by a hook, or as an attribute) met values of "
            "lanes: it is the last lane's alone. Let the module return it"
        )


def came_from(tensor: Tensor, made: Sequence[range]) -> bool:
    """Return whether a node of the tensor's graph has one of these sequence numbers, which grow as nodes are made."""
    first = min((numbers.start for numbers in made if numbers), default=None)
    if first is None:
        return False
    waiting, seen = [tensor.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        # Weights' own nodes have the largest number of all; what they are computed from is nothing.
        if node is None or node in seen or not node.next_functions:
            continue
        seen.add(node)
        number = node._sequence_nr()
        if any(number in numbers for numbers in made):
            return True
        if number >= first:
            waiting += [before for before, _ in node.next_functions]
    return False


def reached_from(tensors: Sequence[Tensor]) -> set[Any]:
    """Return every node that the tensors were computed from."""
    reached: set[Any] = set()
    waiting = [tensor.grad_fn for tensor in tensors]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in reached:
            reached.add(node)
            waiting += [before for before, _ in node.next_functions]
    return reached
