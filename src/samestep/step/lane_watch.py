"""Observers of steps while they run."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LaneWatch(Protocol):
    """Looks into steps while they run: for a trace of everything that they compute."""

    reads_gradients: bool
    """Whether `summed` reads `.grad`, which `distributed.shard` leaves with owners alone unless asked."""

    def enter_lane(self, step: int, lane: int) -> None:
        """A lane's forward pass begins; the last one is over."""

    def forget_lane(self) -> None:
        """Forget the open lane: what it has computed so far was a trial, and counts for nothing."""

    def leave_lane(self, loss: Tensor | float, count: Tensor | float) -> None:
        """The lane's forward pass is over, its last backward pass comes next."""

    def leave_lanes(self) -> None:
        """The last lane of a pass over all of them is over."""

    def summed(self, step: int) -> None:
        """Gradients and buffers are those of all lanes; the update comes next."""
