"""Self-contained HTML pages: one style, and plots that load nothing from the network."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from samestep.errors import MissingExtraError, OutputError

_GENERATOR = '<meta name="generator" content="samestep">'
"""By which we know a page of ours."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; color: #1d2733 }
h1 { font-size: 1.4rem } .kept { color: #12703c } .broken { color: #b3261e }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 }
th, td { text-align: left; padding: .35rem .7rem; border-bottom: 1px solid #dde3ea }
.number { text-align: right; font-variant-numeric: tabular-nums }
code { background: #f1f4f7; padding: .1rem .3rem; border-radius: .2rem }
"""


def require_plotly() -> Any:
    """Plotly's `graph_objects` module; raises the error that names the extra if it is missing."""
    try:
        import plotly.graph_objects
    except ImportError:
        raise MissingExtraError("the HTML report", "report") from None
    return plotly.graph_objects


def write_page(path: Path, title: str, body: str) -> None:
    """Write a page; one that we have written before is replaced.

    Args:
        path: the file.
        title: plain text; it is escaped.
        body: HTML.

    Raises:
        OutputError: if another file is there.
    """
    refuse_other_file(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(title, body), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None


def refuse_other_file(path: Path) -> None:
    """Refuse to replace what is no page of ours; before the work of a command, not after it."""
    try:
        with path.open("rb") as file:
            ours = _GENERATOR.encode() in file.read(1000)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None
    if not ours:
        raise OutputError(f"{path} exists already, and is no page of samestep: name another file")


def page(title: str, body: str) -> str:
    """A complete HTML document that loads nothing from the network.

    Args:
        title: plain text; it is escaped.
        body: HTML.
    """
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">{_GENERATOR}<title>{html.escape(title)}</title>
<style>{_STYLE}</style></head><body>
{body}
</body></html>
"""
