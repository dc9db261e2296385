"""Python source that is looked at, and not run."""

from __future__ import annotations

import ast
import warnings
from importlib.util import decode_source
from pathlib import Path

from samestep.errors import TextError
from samestep.parsing.files import LARGEST_FILE, read_bytes
from samestep.parsing.limits import short


def parse_python(path: Path) -> ast.Module:
    """Return the syntax tree of a file; raises a `TextError` with the line if it is no Python."""
    return _parsed(read_bytes(path))


def read_python(path: Path, most: int = LARGEST_FILE) -> str:
    """Return the text of a file of at most so many bytes, in the encoding that it declares.

    Raises a `TextError` if it has none.
    """
    content = read_bytes(path, most)
    if b"\x00" in content:
        raise TextError("is not text: it holds null characters")
    try:
        return decode_source(content)
    except (SyntaxError, UnicodeDecodeError):  # an unknown encoding, or not what it declares
        raise TextError("is not text of the encoding that it declares, or else UTF-8") from None


def parse_python_text(text: str) -> ast.Module:
    """Return the syntax tree of a text; raises a `TextError` with the line if it is no Python."""
    return _parsed(text)


def _parsed(source: str | bytes) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of "\d" in a string: whoever runs it hears of it
            return ast.parse(source)
    except SyntaxError as error:
        raise TextError(f"is not Python: {short(error.msg)}, on line {error.lineno}") from None
    except (RecursionError, MemoryError, ValueError) as error:  # too deep, or null characters
        raise TextError(f"is not Python: {short(str(error)) or 'it is nested too deep'}") from None
