"""The curves of runs as a self-contained page, with what each run was made with."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from samestep.report.chart import Panel, chart
from samestep.report.curves.history import History
from samestep.report.curves.summary import table
from samestep.report.page import write_page
from samestep.report.run_facts import run_facts

_TEXTS = ("metric", "run", "curve", "")
"""Columns that are no numbers."""


def write_html(
    histories: Sequence[History], metrics: Sequence[str], panels: Sequence[Panel], path: Path, force: bool = False
) -> None:
    """Write the page.

    Args:
        histories: the runs.
        metrics: the metrics of the table.
        panels: what is drawn.
        path: the file.
        force: whether a file that is no page of ours is replaced.

    Raises:
        OutputError: if the file is not ours to replace, or cannot be written.
    """
    title = ", ".join(history.label for history in histories)
    body = f"""<h1>{html.escape(title)}</h1>
{chart(panels, wide=len(panels) > 1)}
<p>Of many steps, a curve shows means; the band is the range of their values. Triangles: values that are NaN or
infinite, and skipped steps.</p>
{_table(*table(histories, metrics))}
{_runs(histories)}"""
    write_page(path, title, body, force=force)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    classes = ["" if name in _TEXTS else ' class="number"' for name in header]
    kept = [place for place, name in enumerate(header) if name != "curve"]  # drawn above

    def cells(tag: str, texts: Sequence[str]) -> str:
        inside = "".join(f"<{tag}{classes[n]}>{html.escape(texts[n])}</{tag}>" for n in kept)
        return f"<tr>{inside}</tr>"

    lines = "\n".join(cells("td", row) for row in rows)
    return f"<table><thead>{cells('th', header)}</thead><tbody>{lines}</tbody></table>"


def _runs(histories: Sequence[History]) -> str:
    """Return what each run was made with, side by side."""
    facts = [{"directory": str(history.run), **run_facts(history.run)} for history in histories]
    names = list(dict.fromkeys(name for one in facts for name in one))
    head = "".join(f"<th>{html.escape(history.label)}</th>" for history in histories)
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td>"
        + "".join(f"<td>{html.escape(one.get(name, ''))}</td>" for one in facts)
        + "</tr>"
        for name in names
    )
    return f'<table class="facts"><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>'
