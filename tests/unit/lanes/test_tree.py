"""One tree of additions, whatever pieces the lanes arrive in."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.lanes.plan import deal_lanes
from samestep.lanes.tree import LaneTree, aligned_blocks, merge_order


@st.composite
def cuts(draw: Any) -> list[range]:
    """Any contiguous assignment of 1 to 20 lanes, one or more to each rank."""
    lanes = draw(st.integers(1, 20))
    inner = draw(st.sets(st.integers(1, lanes - 1))) if lanes > 1 else set()
    return [range(a, b) for a, b in pairwise([0, *sorted(inner), lanes])]


def whole_tree(lanes: int) -> Any:
    tree: LaneTree[Any] = LaneTree(lambda left, right: (left, right))
    for lane in range(lanes):
        tree.push(lane, 1, lane)
    return tree.close()


def tree_over_ranks(assignment: list[range]) -> Any:
    """The expression when each rank adds its own lanes and merge_order adds the rest."""
    slots: list[Any] = []
    blocks: list[tuple[int, int]] = []
    for lanes in assignment:
        own: LaneTree[Any] = LaneTree(lambda left, right: (left, right))
        for lane in lanes:
            own.push(lane, 1, lane)
        slots += own.nodes
        blocks += aligned_blocks(lanes)
    assert len(slots) == len(blocks)
    for left, right in merge_order(blocks):
        slots[left] = (slots[left], slots[right])
        slots[right] = "used up"
    return slots[0]


def depth(expression: Any) -> int:
    return 1 + max(map(depth, expression)) if isinstance(expression, tuple) else 0


@given(cuts())
def test_any_assignment_adds_the_lanes_in_the_same_tree(assignment: list[range]) -> None:
    assert tree_over_ranks(assignment) == whole_tree(assignment[-1].stop)


@pytest.mark.parametrize("lanes", range(1, 21))
def test_every_world_size_adds_the_lanes_in_the_same_tree(lanes: int) -> None:
    trees = {tree_over_ranks(deal_lanes(lanes, world)) for world in range(1, lanes + 1)}
    assert trees == {whole_tree(lanes)}


@pytest.mark.parametrize("lanes", range(1, 21))
def test_the_tree_is_as_shallow_as_a_binary_tree_can_be(lanes: int) -> None:
    assert depth(whole_tree(lanes)) == math.ceil(math.log2(lanes))


def test_the_tree_of_existing_runs_does_not_change() -> None:
    assert whole_tree(4) == ((0, 1), (2, 3))
    assert whole_tree(7) == (((0, 1), (2, 3)), ((4, 5), 6))


@given(cuts())
def test_aligned_blocks_tile_a_ranks_lanes(assignment: list[range]) -> None:
    for lanes in assignment:
        blocks = aligned_blocks(lanes)
        starts = list(accumulate((size for _, size in blocks), initial=lanes.start))
        assert [start for start, _ in blocks] == starts[:-1]
        assert starts[-1] == lanes.stop
        assert all(size & (size - 1) == 0 and start % size == 0 for start, size in blocks)


def test_a_cleared_tree_starts_again() -> None:
    tree: LaneTree[str] = LaneTree(lambda left, right: left + right)
    tree.push(0, 1, "a")
    tree.clear()
    tree.push(0, 1, "b")
    tree.push(1, 1, "c")
    assert tree.close() == "bc"


def test_open_blocks_are_kept_apart_until_their_sibling_comes() -> None:
    tree: LaneTree[str] = LaneTree(lambda left, right: f"({left}{right})")
    for lane in range(1, 6):
        tree.push(lane, 1, str(lane))
    assert tree.nodes == ["1", "(23)", "(45)"], "lanes 2-3 belong to 0-1, which are another rank's"


def test_whole_blocks_merge_like_the_lanes_in_them() -> None:
    tree: LaneTree[str] = LaneTree(lambda left, right: f"({left}{right})")
    tree.push(0, 2, "a")
    tree.push(2, 2, "b")
    tree.push(4, 4, "c")
    assert tree.nodes == ["((ab)c)"]


@pytest.mark.parametrize(
    ("blocks", "additions"),
    [
        ([(0, 4)], []),
        ([(0, 2), (2, 2)], [(0, 1)]),
        ([(0, 1), (1, 1), (2, 2)], [(0, 1), (0, 2)]),
        ([(0, 2), (2, 1), (3, 1), (4, 1)], [(1, 2), (0, 1), (0, 3)]),
    ],
)
def test_additions_end_in_the_first_slot(blocks: list[tuple[int, int]], additions: list[tuple[int, int]]) -> None:
    assert merge_order(blocks) == additions
