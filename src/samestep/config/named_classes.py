"""Classes that a config names, and whether they take its arguments. No torch here."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

from samestep.errors import Mistake

Takes = Mapping[str, inspect.Parameter]
"""Arguments that a config can give, by name."""


@dataclass(frozen=True)
class Named:
    """A class's name, and all that it takes."""

    name: str
    takes: Takes


NamedClasses = Mapping[str, Named]
"""By their names in small letters."""


def arguments_of(target: Any, without: Iterable[str]) -> Takes:
    """Return what a class or function takes by name, but for what is given to it otherwise."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(target).parameters
    return leave_out({n: p for n, p in found.items() if p.kind in kinds}, without)


def leave_out(takes: Takes, names: Iterable[str]) -> Takes:
    """Return the arguments without some of them."""
    left_out = set(names)
    return {name: parameter for name, parameter in takes.items() if name not in left_out}


def argument_mistakes(path: str, owner: str, takes: Takes, given: Mapping[str, Any]) -> list[Mistake]:
    """Arguments of a config that the owner does not take, and those that it cannot do without."""
    known = f"it takes {', '.join(takes)}" if takes else "it takes none"
    wrong = [Mistake(f"{path}.{name}", f"{owner} does not take it: {known}") for name in given if name not in takes]
    missing = [
        Mistake(f"{path}.{name}", f"{owner} cannot do without it: set it ({known})")
        for name, parameter in takes.items()
        if parameter.default is inspect.Parameter.empty and name not in given
    ]
    return wrong + missing


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
