"""Lanes side by side on streams of a GPU, and the sum of their gradients in the tree's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from samestep.lanes.tree import LaneTree
from samestep.reduce.gradients import Grads, add_grads


class _Node(NamedTuple):
    """The sum of some lanes."""

    grads: Grads
    stream: torch.cuda.Stream
    """The one that their memory was allocated on, and will be freed on."""
    ready: torch.cuda.Event


def run_side_by_side(
    lanes: Mapping[int, Callable[[], Grads]], held: range, streams: Sequence[torch.cuda.Stream]
) -> list[Grads]:
    """Run lanes on streams in turn and add up their gradients; returns one sum for each block.

    The additions are those of the tree, so that the number of streams does not matter. Memory of a
    lane is free for the next one on its stream, and a lane's gradients are added as soon as there is
    something to add them to: no more of them are held than lanes run at once, and the tree is deep.

    Args:
        lanes: By lane, what runs its forward and backward pass; in order. Others have no samples.
        held: All lanes of this rank.
        streams: As many as lanes may run at once; none for one at a time, on the current stream.
    """
    here = torch.cuda.current_stream()
    streams = streams or [here]
    for stream in streams:
        stream.wait_stream(here)
    tree: LaneTree[_Node | None] = LaneTree(_add)
    try:
        for turn, lane in enumerate(held):
            run = lanes.get(lane)
            stream = streams[turn % len(streams)]
            with torch.cuda.stream(stream):
                node = None if run is None else _Node(run(), stream, stream.record_event())
            tree.push(lane, 1, node)
    finally:  # a capture that fails must leave no stream behind
        for stream in streams:
            here.wait_stream(stream)
    return [[] if node is None else node.grads for node in tree.nodes]


def _add(left: _Node | None, right: _Node | None) -> _Node | None:
    if left is None or right is None:
        return right if left is None else left
    # Where the right memory is freed afterwards: what is put there next comes behind this.
    with torch.cuda.stream(right.stream):
        right.stream.wait_event(left.ready)
        right.stream.wait_event(right.ready)
        grads = add_grads(left.grads, right.grads)
        return _Node(grads, left.stream, right.stream.record_event())
