"""The parts of each page of the live view: HTML that changes, and at most one chart."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from urllib.parse import urlencode

from samestep.report.chart import Panel, chart
from samestep.report.page import page
from samestep.report.table import Cell

_STYLE = files(__package__).joinpath("live.css").read_text("utf-8")
_SCRIPT = files(__package__).joinpath("live.js").read_text("utf-8")

Link = Callable[..., str]
"""From a kind of page and its paths to the address of that page; empty if there is none."""


class View:
    """One page, read anew whenever it is shown."""

    title = "samestep"
    where = ""
    """Which entry of the navigation it belongs to."""
    above_chart = 1
    """The number of parts that come before the chart."""

    def parts(self, link: Link) -> dict[str, str]:
        """Return the HTML of each part that may change, by its id, in the order of the page."""
        raise NotImplementedError

    def panels(self) -> Sequence[Panel] | None:
        """Return the chart; None if it is as it was at the last call, or if there is none."""
        return None


def live_link(kind: str, *paths: object) -> str:
    """Return the address of a page of the server."""
    return f"{kind}?{urlencode([('path', str(path)) for path in paths])}" if paths else kind


def anchor(address: str, text: str) -> Cell:
    """Return a cell with a link; plain text without an address."""
    words = html.escape(text)
    return Cell(f'<a href="{html.escape(address)}">{words}</a>' if address else words)


def live_page(view: View) -> str:
    """Return the page as the server sends it; its script then follows the changes."""
    entries = (("runs", "./", "Runs"), ("sweeps", "sweeps", "Sweeps"), ("proofs", "proofs", "Proofs"))
    links = " ".join(
        f'<a href="{address}"{" aria-current=page" if name == view.where else ""}>{words}</a>'
        for name, address, words in entries
    )
    share = '<a id="share" download="samestep.html" href="#">save this page as a file</a>'
    head = f'<nav><b>samestep</b> {links} <span id="connection"></span>{share}</nav>'
    body = f"{head}<h1>{html.escape(view.title)}</h1>{_body(view, live_link)}<script>{_SCRIPT}</script>"
    return page(view.title, f"<style>{_STYLE}</style>{body}", live=True)


def static_page(views: Sequence[View]) -> str:
    """Return one file that shows some pages as they are now, with links between them."""
    names = {view.title: f"page-{number}" for number, view in enumerate(views)}

    def link(kind: str, *paths: object) -> str:
        del kind
        name = names.get(str(paths[0])) if paths else None
        return f"#{name}" if name else ""

    body = "".join(f'<h1 id="{names[view.title]}">{html.escape(view.title)}</h1>{_body(view, link)}' for view in views)
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return page(", ".join(names), f"<style>{_STYLE}</style>{body}", {"state of": now})


def _body(view: View, link: Link) -> str:
    parts = view.parts(link)
    panels = view.panels()
    shown = "" if panels is None else chart(panels, wide=len(panels) > 1)
    sections = [f'<section id="part-{name}">{text}</section>' for name, text in parts.items()]
    return "".join([*sections[: view.above_chart], shown, *sections[view.above_chart :]])


def ago(seconds: float) -> str:
    """Return a time span in few characters."""
    for unit, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"
