"""The curves of runs as a self-contained page, with what each run was made with."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from samestep.report.chart import Panel, chart
from samestep.report.curves.history import History
from samestep.report.curves.summary import table
from samestep.report.page import write_page
from samestep.report.run_facts import config_differences, run_facts
from samestep.report.table import html_table

_TEXTS = ("metric", "run", "curve", "")
"""Columns that are no numbers."""


def write_html(
    histories: Sequence[History], metrics: Sequence[str], panels: Sequence[Panel], path: Path, force: bool = False
) -> None:
    """Write the page.

    Args:
        force: whether a file that is no page of ours is replaced.

    Raises:
        OutputError: if the file is not ours to replace, or cannot be written.
    """
    title = ", ".join(history.label for history in histories)
    body = f"""<h1>{html.escape(title)}</h1>
{chart(panels, wide=len(panels) > 1)}
<p>Of many steps, a curve shows means; the band is the range of their values. Triangles: values that are NaN or
infinite, and skipped steps.</p>
{metrics_table(histories, metrics)}
{differences_table(histories)}
{_runs(histories)}"""
    write_page(path, title, body, force=force)


def metrics_table(histories: Sequence[History], metrics: Sequence[str]) -> str:
    """Return the last, the best and the mean value of each metric of each run."""
    header, rows = table(histories, metrics)
    kept = [place for place, name in enumerate(header) if name != "curve"]  # drawn above
    columns = [header[place] for place in kept]
    numbers = [name for name in columns if name not in _TEXTS]
    return html_table(columns, [[row[place] for place in kept] for row in rows], numbers)


def differences_table(histories: Sequence[History]) -> str:
    """Return the values of configs that are not the same in all runs; empty for one run."""
    if len(histories) < 2:
        return ""
    rows = config_differences([history.run for history in histories])
    if not rows:
        return "<h2>Configs</h2>\n<p>The configs of these runs have the same values.</p>"
    columns = ["key", *(history.label for history in histories)]
    return f"<h2>Configs: where they differ</h2>\n{html_table(columns, rows, kind='facts')}"


def _runs(histories: Sequence[History]) -> str:
    """Return what each run was made with, side by side."""
    facts = [{"directory": str(history.run), **run_facts(history.run)} for history in histories]
    names = list(dict.fromkeys(name for one in facts for name in one))
    rows = [[name, *(one.get(name, "") for one in facts)] for name in names]
    return f"<h2>Runs</h2>\n{html_table(['', *(history.label for history in histories)], rows, kind='facts')}"
