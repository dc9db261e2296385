"""What every format of an exported model offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

METADATA_FILE = "samestep.json"
"""The metadata's name inside of files that hold other files."""
METADATA_KEY = "samestep"
"""The metadata's name inside of files that hold pairs of text."""


@dataclass(frozen=True)
class Built:
    """A model that is ready to be written."""

    how: str
    notes: tuple[str, ...]
    """What a person should know about it."""
    save: Callable[[Path, str], None]
    """Writes it to a path, with the metadata's text inside."""


def reason(error: Exception) -> str:
    """The first line that says something, of the error at the root."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__).rstrip(".:")
