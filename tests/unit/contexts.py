"""Contexts for tests that need no other process."""

from __future__ import annotations

from typing import Any, TypeVar

from samestep.distributed.context import SingleProcessContext

T = TypeVar("T")


class TwoRanks(SingleProcessContext):
    """A context whose gather also returns what one more rank would give."""

    other: Any = None

    @property
    def world(self) -> int:
        return 2

    def gather(self, value: T) -> list[T]:
        return [value, self.other]
