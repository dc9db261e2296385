"""A model built for one format, ready to be written: what every format provides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

METADATA_FILE = "samestep.json"
"""The metadata's name in formats that are archives of files."""
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
    """The first line with text of an error's root cause."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__).rstrip(".:")
