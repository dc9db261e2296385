"""The interface of a loop's body to the tensors of lanes that are computed in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor

from samestep.step.lane_leaves import LaneLeaves

Lanes = tuple[int, ...]

NO_LANE = -1
"""Stands for the lane of a rank that has no samples in a step: it computes, and nothing of it counts."""


class Pending(Protocol):
    """A computation that has been put off."""

    def materialize(self, value: Any) -> None:
        """Give a value its tensors."""


class LaneScope(Protocol):
    """The interface of a loop's body to functions that run once per lane."""

    uneven: bool
    """Whether lengths differ among lanes."""
    leaves: LaneLeaves | None
    """What lanes compute with in place of the parameters, if their graphs meet."""

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
