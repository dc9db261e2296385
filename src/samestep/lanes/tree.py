"""The order in which lanes are added up: one fixed balanced binary tree, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Node(Generic[T]):
    start: int
    size: int
    value: T


class LaneTree(Generic[T]):
    """Adds lanes up in one fixed balanced binary tree, whatever pieces they arrive in.

    The tree's nodes are the blocks [k * 2^j, (k + 1) * 2^j) of lanes. Push values in lane
    order without gaps, single lanes or whole blocks (an empty lane is pushed as whatever
    `add` takes for nothing); siblings are added as soon as both are there. What
    a rank cannot merge with its own lanes stays apart, to be merged with other ranks'
    blocks by another tree: the additions, and so the bits, are those of one tree over all.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._nodes: list[_Node[T]] = []

    def push(self, start: int, size: int, value: T) -> None:
        node = _Node(start, size, value)
        while self._nodes and _are_siblings(self._nodes[-1], node):
            left = self._nodes.pop()
            node = _Node(left.start, left.size * 2, self._add(left.value, node.value))
        self._nodes.append(node)

    @property
    def nodes(self) -> list[T]:
        return [node.value for node in self._nodes]

    def clear(self) -> None:
        self._nodes.clear()

    def close(self) -> T:
        """The whole sum: open blocks at the right end are added from the right."""
        value = self._nodes[-1].value
        for node in reversed(self._nodes[:-1]):
            value = self._add(node.value, value)
        return value


def _are_siblings(left: _Node[T], right: _Node[T]) -> bool:
    return left.size == right.size and left.start % (2 * left.size) == 0


def aligned_blocks(lanes: range) -> list[tuple[int, int]]:
    """The (start, size) blocks of the tree that a rank's lanes add up to."""
    tree: LaneTree[tuple[int, int]] = LaneTree(lambda left, right: (left[0], left[1] + right[1]))
    for lane in lanes:
        tree.push(lane, 1, (lane, 1))
    return tree.nodes


def merge_order(blocks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The additions `slot[a] += slot[b]` that sum the blocks of all ranks; slot 0 is the root."""
    additions: list[tuple[int, int]] = []

    def add(left: int, right: int) -> int:
        additions.append((left, right))
        return left

    tree: LaneTree[int] = LaneTree(add)
    for slot, (start, size) in enumerate(blocks):
        tree.push(start, size, slot)
    tree.close()
    return additions
