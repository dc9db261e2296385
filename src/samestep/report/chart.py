"""Charts for pages: what they show, as data that `chart.js` draws in the browser."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any, Literal

COLORS = ("#1f5f99", "#c2571a", "#12703c", "#7a3e9d", "#b3261e", "#0b7f8a", "#8a6d00", "#5b6770")
"""For lines that have no color of their own; distinguishable on white."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line, or the points of one.

    Values that are NaN, infinite or None leave a gap.
    """

    name: str
    """Beside its value under the pointer."""
    x: Sequence[float]
    y: Sequence[float | None]
    color: str
    group: str = ""
    """Its entry in the legend, which hides all lines of the group; none if empty."""
    width: float = 2
    dash: Literal["", "dash", "dot"] = ""
    opacity: float = 1
    joined: bool = True
    """Whether there is a line between the points."""
    mark: Literal["", "circle", "star"] = ""
    """What each point is marked with."""
    hover: bool = True
    """Whether its values are shown under the pointer."""
    text: Sequence[str] | None = None
    """More about each point."""
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    """With `low`, the band around the line; of bars, the whisker on each."""
    bar: float = 0
    """How wide the bars are that stand in place of points, in units of the axis; 0 for none."""
    base: Sequence[float] | None = None
    """Where each bar begins; at 0 if not given."""
    flags: Sequence[Mapping[str, Any]] = ()
    """`x` and `text` of what is marked below the line."""
    axes: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """`x` on every axis that a reader may choose, by name; with none there is no choice."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines on one pair of axes."""

    title: str
    lines: Sequence[Line]
    x: str = "step"
    """What the axis is of; also `y`."""
    y: str = ""
    xlog: bool = False
    ylog: bool = False
    xticks: Sequence[float] | None = None
    """Where the axis has numbers; None lets the chart choose. Also `yticks`."""
    xlabels: Sequence[str] | None = None
    """What stands at each of `xticks` in place of its number; also `ylabels`."""
    yticks: Sequence[float] | None = None
    ylabels: Sequence[str] | None = None
    notes: Sequence[Mapping[str, Any]] = ()
    """`x`, `y` and `text` of words inside the panel."""
    xrange: tuple[float, float] | None = None
    yrange: tuple[float, float] | None = None
    zero: bool = False
    """Whether the vertical axis begins at 0."""
    height: int = 320
    alone: bool = False
    """Whether its horizontal axis is its own; else all panels show the same range of it."""
    full: bool = False
    """Whether it has the whole width where others are side by side."""
    smooth: float | None = None
    """The weight of the past in a running mean that is drawn over each line; a reader may change it unless it is None."""
    nearest: bool = False
    """Whether the one nearest point is shown under the pointer, and not one of each line."""


def chart(panels: Sequence[Panel], wide: bool = False) -> str:
    """Return the HTML of panels that share a legend and the zoomed range.

    Args:
        wide: whether two of them are side by side where the window is wide enough.
    """
    data = embedded_json([asdict(panel) for panel in panels])
    here = files(__package__)
    style, code = (here.joinpath(f"chart.{kind}").read_text("utf-8") for kind in ("css", "js"))
    return f"""<style>{style}</style>
<figure class="chart{" wide" if wide else ""}"><script type="application/json">{data}</script>
<noscript>The curves are drawn by JavaScript, which is off.</noscript></figure>
<script>{code}</script>"""


def embedded_json(value: Any) -> str:
    """Return the value in JSON that no text in it can end the script of; NaN and infinity are null."""
    data = json.dumps(finite(value), allow_nan=False)
    return data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def finite(value: Any) -> Any:
    """Return the value with null in the place of numbers that JSON does not have: NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(inner) for inner in value]
    return value
