"""JSON from elsewhere: also what this program wrote itself, since a disk or a person may change it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samestep.errors import TextError
from samestep.parsing.files import read_lines, read_text
from samestep.parsing.limits import DEEPEST_JSON, check_values, short

_MANY_DIGITS = re.compile("[0-9]{100}")


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; raises a `TextError` if it has none."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise TextError(f"is nested more than {DEEPEST_JSON} levels deep") from None
    except ValueError as error:  # also for whole numbers of more than 4,300 digits
        raise TextError(f"is not valid JSON: {short(str(error))}") from None
    if not _is_harmless(text):
        check_values(value, DEEPEST_JSON)
    return value


def _is_harmless(text: str) -> bool:
    """Return whether the text itself shows that no value in it is refused: most are short rows of numbers."""
    few_levels = text.count("[") + text.count("{") < DEEPEST_JSON
    return few_levels and text.isascii() and "\\u" not in text and _MANY_DIGITS.search(text) is None


def read_json(path: Path) -> Any:
    """Return the value of a JSON file; raises a `TextError` if it cannot be read or has none."""
    return parse_json(read_text(path))


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file cannot be read or holds another value."""
    try:
        value = read_json(path)
    except TextError:
        return {}
    return value if isinstance(value, dict) else {}


def read_json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the object of each line of a file; None for a line that holds none.

    A run that was killed leaves half a line at its end. Raises a `TextError` if the file cannot be
    read.
    """
    for line in read_lines(path):
        if line.isspace():
            continue
        try:
            value = parse_json(line)
        except TextError:
            value = None
        yield value if isinstance(value, dict) else None
