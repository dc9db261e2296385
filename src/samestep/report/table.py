"""Tables of HTML pages."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

NUMBER = "number"
"""The class of cells that are aligned to the right."""


@dataclass(frozen=True)
class Cell:
    """A cell that is more than plain text."""

    html: str
    kind: str = ""
    """Its CSS class."""


def marked(text: str, kind: str) -> Cell:
    """Return a cell of plain text with a CSS class."""
    return Cell(html.escape(text), kind)


def code(text: str) -> Cell:
    """Return a cell of code."""
    return Cell(f"<code>{html.escape(text)}</code>")


def html_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    numbers: Collection[str] = (),
    kind: str = "",
    digits: str = ".4g",
) -> str:
    """Return a table. Numbers are aligned to the right.

    Args:
        numbers: The columns whose texts are numbers.
    """
    first = rows[0] if rows else ()
    found = [_is_number(value) for value in first] or [False] * len(columns)
    kinds = [NUMBER if found[n] or name in numbers else "" for n, name in enumerate(columns)]
    head = f"<thead>{_line('th', columns, kinds, digits)}</thead>" if columns else ""
    body = "\n".join(_line("td", row, kinds, digits) for row in rows)
    return f"<table{_class(kind)}>{head}<tbody>{body}</tbody></table>"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _line(tag: str, values: Sequence[Any], kinds: Sequence[str], digits: str) -> str:
    cells = [_cell(value, digits) for value in values]
    named = [cell.kind or (kinds[n] if kinds else "") for n, cell in enumerate(cells)]
    inside = "".join(f"<{tag}{_class(kind)}>{cell.html}</{tag}>" for cell, kind in zip(cells, named, strict=True))
    return f"<tr>{inside}</tr>"


def _cell(value: Any, digits: str) -> Cell:
    if isinstance(value, Cell):
        return value
    if _is_number(value):
        return Cell(f"{value:{digits}}" if isinstance(value, float) else f"{value:,}", NUMBER)
    return Cell(html.escape(str(value)))


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
