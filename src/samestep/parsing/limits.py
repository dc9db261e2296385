"""Limits of values from elsewhere: far beyond what anybody writes, and quickly handled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from samestep.errors import TextError

DEEPEST = 100
"""Levels of nesting in a config. Python's limit is about a thousand calls, and a reader takes several."""
DEEPEST_JSON = 2 * DEEPEST
"""In files of our own, which hold a config some levels down."""
LARGEST = 10**100
"""Whole numbers beyond are neither a count nor a float, and slow to print."""
SHOWN = 200
"""Characters of a value in a message."""


def check_shape(value: Any, most: int) -> None:
    """Raise a `TextError` for values that are nested too deep, or too many.

    Args:
        value: nested mappings, lists and plain values; objects of other kinds are not looked into.
        most: how many values there may be, counted as often as they are used.
    """
    for seen, _ in enumerate(_leaves(value, DEEPEST)):
        if seen > most:
            raise TextError(f"holds more than {most:,} values")


def check_values(value: Any, deepest: int = DEEPEST) -> None:
    """Raise a `TextError` for values that cannot be handed on, printed or saved."""
    for leaf in _leaves(value, deepest):
        if isinstance(leaf, str):
            check_text(leaf)
        elif isinstance(leaf, int) and abs(leaf) >= LARGEST:
            raise TextError("holds a whole number of more than 100 digits")


def _leaves(value: Any, deepest: int) -> Iterator[Any]:
    """Yield all that is inside nested mappings and lists; a container counts as well, as None."""
    waiting = [(value, 0)]
    while waiting:
        current, depth = waiting.pop()
        if not isinstance(current, (Mapping, list, tuple)):
            yield current
            continue
        if depth >= deepest:
            raise TextError(f"is nested more than {deepest} levels deep")
        yield None
        names = current if isinstance(current, Mapping) else ()
        inside = current.values() if isinstance(current, Mapping) else current
        waiting += ((entry, depth + 1) for entries in (names, inside) for entry in entries)


def check_text(text: str) -> None:
    """Raise a `TextError` for text that no file, path or terminal takes."""
    if "\x00" in text:
        raise TextError(f"holds a null character, in {short(repr(text))}")
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise TextError(f"holds half of a surrogate pair, in {short(ascii(text))}")


def visible(text: str) -> str:
    """Return text without control characters, which a terminal would obey; they are shown as escapes."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


def short(text: str, most: int = SHOWN) -> str:
    """Return the text, or its beginning: a message is for reading."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"
