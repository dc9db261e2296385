"""The order in which lanes are added up: one fixed balanced binary tree, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

T = TypeVar("T")


class LaneTree(Generic[T]):
    """Adds lanes up in one fixed balanced binary tree, whatever pieces they arrive in.

    The tree's nodes are the blocks [k * 2^j, (k + 1) * 2^j) of lanes. Push values in lane
    order, single lanes or whole blocks (an empty lane is pushed as whatever
    `add` takes for nothing); siblings are added as soon as both are there. What
    a rank cannot merge with its own lanes stays apart, to be merged with other ranks'
    blocks by another tree: the additions, and so the bits, are those of one tree over all.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._nodes: list[tuple[int, int, T]] = []
        """(start, size, value) of blocks that still wait for their sibling."""

    def push(self, start: int, size: int, value: T) -> None:
        nodes = self._nodes
        while nodes:
            left_start, left_size, left = nodes[-1]
            if left_size != size or left_start % (2 * size) or left_start + size != start:
                break  # not siblings
            nodes.pop()
            start, size, value = left_start, 2 * size, self._add(left, value)
        nodes.append((start, size, value))

    @property
    def nodes(self) -> list[T]:
        return [value for _, _, value in self._nodes]

    def keep(self, kept: Callable[[T], T]) -> None:
        """Let each open block's value be another one, such as a copy."""
        self._nodes = [(start, size, kept(value)) for start, size, value in self._nodes]

    def clear(self) -> None:
        self._nodes.clear()

    def close(self) -> T:
        """Return the whole sum: open blocks at the right end are added from the right."""
        value = self._nodes[-1][2]
        for _, _, left in reversed(self._nodes[:-1]):
            value = self._add(left, value)
        return value


def aligned_blocks(lanes: range) -> list[tuple[int, int]]:
    """Return the (start, size) blocks of the tree that a rank's lanes add up to."""
    tree: LaneTree[tuple[int, int]] = LaneTree(lambda left, right: (left[0], left[1] + right[1]))
    for lane in lanes:
        tree.push(lane, 1, (lane, 1))
    return tree.nodes


def merge_order(blocks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the additions `slot[a] += slot[b]` that sum the blocks of all ranks; slot 0 is the root."""
    additions: list[tuple[int, int]] = []

    def add(left: int, right: int) -> int:
        additions.append((left, right))
        return left

    tree: LaneTree[int] = LaneTree(add)
    # In the order of lanes: ranks that take lanes in turn hold them in another one.
    for start, size, slot in sorted((*block, slot) for slot, block in enumerate(blocks)):
        tree.push(start, size, slot)
    tree.close()
    return additions


def sum_of_lanes(values: Sequence[float]) -> float:
    """Return the sum of one number for each lane, in the tree's order."""
    numbers = list(values)
    for left, right in _additions(len(numbers)):
        numbers[left] += numbers[right]
    return numbers[0]


@lru_cache
def _additions(lanes: int) -> Sequence[tuple[int, int]]:
    return tuple(merge_order([(lane, 1) for lane in range(lanes)]))
