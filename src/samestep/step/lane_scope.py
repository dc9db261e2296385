"""The lanes of a loop's body: the interface to them, and their leaves of one graph.

Lanes that meet in a layer have one graph. What they share, such as the weights, then enters it as one leaf per
lane, in the same memory, so that one backward pass over all lanes leaves a gradient of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

Lanes = tuple[int, ...]

NO_LANE = -1
"""Stands for the lane of a rank that has no samples in a step: it computes, and nothing of it counts."""


class Pending(Protocol):
    """A computation that has been put off."""

    def materialize(self, value: Any) -> None:
        """Give a value its tensors."""


class LaneScope(Protocol):
    """The interface of a loop's body to the functions called in it."""

    uneven: bool
    """Whether lengths differ among lanes."""
    leaves: LaneLeaves | None
    """What lanes compute with in place of the parameters, if their graphs meet."""

    @property
    def is_put_off(self) -> bool:
        """Return whether operations wait for the backward pass."""

    def make(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Draw by sizes."""

    def run_now(self, why: str) -> None:
        """Run what was put off."""

    def warn_of_one_draw(self, name: str) -> None:
        """An ordinary tensor was drawn, or changed by a draw."""

    def run_operation(self, func: Any, args: Any, kwargs: Any, lanes: Lanes, draws: bool) -> Any:
        """Run a torch function once per lane; `draws` if it may draw random numbers."""

    def whole_lanes(self) -> AbstractContextManager[Callable[[int], None]]:
        """Around code that runs once per lane; what is yielded is called with each lane before it."""

    def paused(self) -> AbstractContextManager[None]:
        """Around lines that are those of an ordinary program."""

    def again(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what lets lines of the body run a second time, in its backward pass."""

    def meets_graph(self, shared: Tensor) -> None:
        """A value of lanes is computed with something that all share and that has a graph."""

    def backward(self, loss: Any, **options: Any) -> Callable[[], Tensor]:
        """Backpropagate a loss of each lane; returns what computes that of the global batch."""


scope_of_body: ContextVar[LaneScope | None] = ContextVar("scope_of_body", default=None)
"""The loop's body that is running; None outside of one."""


@contextmanager
def no_lanes() -> Iterator[None]:
    """Around lines that are those of an ordinary program, whatever body is running."""
    body = scope_of_body.get()
    with nullcontext() if body is None else body.paused():
        yield


class LaneLeaves:
    """The leaves of the lanes of this rank, in one step."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._known: dict[tuple[int, int], tuple[Tensor, list[Tensor]]] = {}
        """By what lanes share, and its memory, which `p.data = ...` changes: itself, and the leaf of each lane."""

    def of(self, shared: Tensor, at: int) -> Tensor:
        """Return what a lane computes with in place of a tensor that lanes share."""
        return self.of_lanes(shared)[at]

    def of_lanes(self, shared: Tensor) -> Sequence[Tensor]:
        """Return what the lanes compute with in place of a tensor that they share, one after the other."""
        if not shared.requires_grad:
            return (shared,) * self._lanes
        key = id(shared), shared.data_ptr()
        found = self._known.get(key)
        if found is None:
            with torch.inference_mode(False):
                own = [shared.detach().requires_grad_() for _ in range(self._lanes)]
            found = self._known[key] = shared, own
        return found[1]

    def backward(self, losses: Sequence[Tensor], start: Tensor | None, retain: bool) -> None:
        """Backpropagate the losses of all lanes.

        Args:
            losses: One per lane.
            start: The gradient of each; None for 1.
            retain: Whether the graph is kept.
        """
        starts = [torch.ones_like(loss) if start is None else start.to(loss) for loss in losses]
        torch.autograd.backward(list(losses), starts, retain_graph=retain)

    def backward_for_nothing(self, values: Sequence[Tensor], retain: bool) -> None:
        """Backpropagate zeros, and forget the gradients: the backward passes of layers meet other ranks'."""
        found = [value for value in values if value.requires_grad]
        if not found:
            return
        torch.autograd.backward(found, [torch.zeros_like(v) for v in found], retain_graph=retain)
        for _, own in self._known.values():
            own[0].grad = None

    def put(self, at: int) -> None:
        """Add the gradients of a lane to `.grad` of what the lanes share."""
        behind: list[tuple[Tensor, Tensor]] = []
        for shared, own in self._known.values():
            grad, own[at].grad = own[at].grad, None
            if grad is None:
                continue
            if not shared.is_leaf or shared._backward_hooks:
                behind.append((shared, grad))
            else:
                shared.grad = grad if shared.grad is None else shared.grad + grad
        if behind:
            torch.autograd.backward([shared for shared, _ in behind], [grad for _, grad in behind], retain_graph=True)
