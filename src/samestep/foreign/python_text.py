"""Python source that is looked at, and not run."""

from __future__ import annotations

import ast
from pathlib import Path

from samestep.errors import TextError
from samestep.foreign.files import read_bytes
from samestep.foreign.limits import short


def parse_python(path: Path) -> ast.Module:
    """The syntax tree of a file; raises a `TextError` with the line if it is no Python."""
    content = read_bytes(path)
    try:
        return ast.parse(content)
    except SyntaxError as error:
        raise TextError(f"is not Python: {short(error.msg)}, on line {error.lineno}") from None
    except (RecursionError, MemoryError, ValueError) as error:  # too deep, or null characters
        raise TextError(f"is not Python: {short(str(error)) or 'it is nested too deep'}") from None
