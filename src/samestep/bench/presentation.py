"""The form in which people see a measurement, on a terminal and on a page. No torch here."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.bench.document import Document
from samestep.report.chart import Panel, chart
from samestep.report.page import write_page
from samestep.report.table import html_table


@dataclass(frozen=True)
class Table:
    """Figures in rows; the first column names what they are of."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    """What a reader must know to read it."""


@dataclass(frozen=True)
class Presentation:
    """A measurement as it is shown."""

    title: str
    heading: str
    """What was measured on what, in one line."""
    panels: Sequence[Panel]
    tables: Sequence[Table]
    verdicts: Sequence[str] = ()
    """What follows from the figures, in a sentence each."""


def write_html(document: Document, shown: Presentation, path: Path) -> None:
    """Write a page."""
    facts = {name: _text(value) for name, value in document.machine.items()}
    write_page(path, shown.title, f"<h1>{html.escape(shown.title)}</h1>\n{section(shown)}", facts)


def section(shown: Presentation, wide: bool = False, tag: str = "h2", most: int | None = None) -> str:
    """Return a measurement as a part of a page, below a title; `tag` and `most` as of `table_html`."""
    verdicts = "".join(f"<li>{html.escape(verdict)}</li>" for verdict in shown.verdicts)
    tables = "\n".join(table_html(table, tag, most) for table in shown.tables)
    return f"""<p>{html.escape(shown.heading)}.</p>
{f"<ul>{verdicts}</ul>" if verdicts else ""}
{chart(shown.panels, wide=wide) if shown.panels else ""}
{tables}"""


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def table_html(table: Table, tag: str = "h2", most: int | None = None) -> str:
    """Return a table with its title.

    Args:
        most: One with more rows is folded, and opens with a click; None folds none.
    """
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    body = note + html_table(table.columns, table.rows, numbers=table.columns[1:])
    if most is not None and len(table.rows) > most:
        title = f"{html.escape(table.title)}: {len(table.rows)} rows"
        return f"<details><summary>{title}</summary>{body}</details>"
    return f"<{tag}>{html.escape(table.title)}</{tag}>\n{body}"
