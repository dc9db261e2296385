"""The code of Jupyter notebooks, without what only IPython understands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import TextError
from samestep.parsing.json_text import read_json

_MAGIC = re.compile(r"^(\s*)(?:[%!?]|\w+(?:\s*,\s*\w+)*\s*=\s*[%!]|[\w.]+\?{1,2}\s*$).*$")
"""A line of IPython's: `%matplotlib inline`, `!ls`, `files = !ls`, `model?`."""
_STILL_PYTHON = re.compile(r"^%%(time|timeit|capture|prun)\b")
"""Magics of a whole cell whose other lines are Python."""


@dataclass(frozen=True)
class Cell:
    number: int
    """Among all cells, from 1."""
    code: str


def notebook_cells(path: Path) -> list[Cell]:
    """Return the cells with Python code; raises a `TextError` if the file is no notebook.

    Lines of IPython's own become `pass`, so that lines keep their numbers.
    """
    found = read_json(path)
    cells = found.get("cells") if isinstance(found, dict) else None
    if not isinstance(cells, list):
        raise TextError("is no notebook: it has no list of cells (nbformat 4)")
    return list(_code_cells(cells))


def _code_cells(cells: list[Any]) -> Iterator[Cell]:
    for number, cell in enumerate(cells, start=1):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source", "")
        text = "".join(map(str, source)) if isinstance(source, list) else str(source)
        if text.lstrip().startswith("%%") and not _STILL_PYTHON.match(text.lstrip()):
            continue
        lines = (_MAGIC.sub(r"\1pass", line) for line in text.splitlines())
        yield Cell(number, "\n".join(lines))
