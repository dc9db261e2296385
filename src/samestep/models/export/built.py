"""A model built for one format, ready to be written: what every format provides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from samestep.parsing.limits import short

METADATA_FILE = "samestep.json"
"""The metadata's name in formats that are archives of files."""
_LONGEST = 400
"""Characters of an error's text."""
METADATA_KEY = "samestep"
"""The metadata's name in formats that hold key-value texts."""


@dataclass(frozen=True)
class Built:
    """A model that is ready to be written."""

    how: str
    """How it was built: scripted, traced, exported, weights only."""
    notes: tuple[str, ...]
    """What the user should know about it."""
    save: Callable[[Path, str], None]
    """Writes it to a path, with the metadata's text inside."""


def reason(error: Exception) -> str:
    """Return the first line with text of an error's root cause, and torch's explanation of it where there is one."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line][:1] or [type(error).__name__]
    told += [line for line in lines if line.startswith("Explanation:")][:1]
    return short("; ".join(line.rstrip(".:") for line in told), _LONGEST)
