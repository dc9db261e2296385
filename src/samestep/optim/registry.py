"""Classes of a module by the names that a config gives them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


def classes_of(module: ModuleType, base: type[T]) -> dict[str, type[T]]:
    """Return the classes of a module that extend `base`, by their names in small letters."""
    return {
        name.lower(): value
        for name, value in sorted(vars(module).items(), key=lambda item: item[0].lower())
        if isinstance(value, type) and issubclass(value, base) and value is not base
        if not name.startswith("_")
    }


def with_tuples(value: Any) -> Any:
    """Return the value with tuples for lists: a config file knows only lists."""
    if isinstance(value, list):
        return tuple(with_tuples(entry) for entry in value)
    if isinstance(value, Mapping):
        return {name: with_tuples(entry) for name, entry in value.items()}
    return value


def closest(word: str, choices: Sequence[str], shown: int = 4) -> str:
    """Return the choices most like a word, as text."""
    near = difflib.get_close_matches(word, choices, n=shown, cutoff=0.3) or list(choices[:shown])
    return ", ".join(near)
