"""A detected value carries its reason, so that the user can see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Fact(Generic[T]):
    """A value and why it is so."""

    value: T
    reason: str
