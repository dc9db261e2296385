"""Points on maps for pages: what they show, as data that `scatter.js` draws in the browser."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from samestep.report.chart import COLORS, embedded_json

RIGHT, WRONG, UNKNOWN = "#9db4c8", "#b3261e", "#8793a0"
_CLASSES = (*COLORS, "#d4559b", "#6fae2e", "#4655d6", "#7a5238")
_GOLDEN = 137.508
"""Degrees between the hues of one class and the next: no two of many come near to each other."""


@dataclass(frozen=True, kw_only=True)
class Map:
    """The place of each point, in one of the pictures that can be chosen."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    note: str = ""
    """What the picture says, and what it does not."""


@dataclass(frozen=True, kw_only=True)
class Points:
    """The facts about each point; as many of everything as there are points."""

    groups: Sequence[int]
    """The number of its class in `names`; -1 for none."""
    names: Sequence[str]
    texts: Sequence[Sequence[str]]
    """Lines under the pointer."""
    wrong: Sequence[bool] | None = None
    """Whether it is an error; None if that is not known of any."""
    pictures: Sequence[bytes] | None = None
    """PNG files; an empty one for a point without."""


def scatter(points: Points, maps: Sequence[Map], height: int = 560) -> str:
    """Return the HTML of maps of the same points, of which one is shown at a time."""
    pictures = None
    if points.pictures is not None:
        pictures = [base64.b64encode(one).decode("ascii") for one in points.pictures]
    data = {
        "height": height,
        "maps": [{"name": one.name, "note": one.note, "x": _short(one.x), "y": _short(one.y)} for one in maps],
        "groups": list(points.groups),
        "names": list(points.names),
        "colors": [color_of(number) for number in range(len(points.names))],
        "unknown": UNKNOWN,
        "texts": [list(lines) for lines in points.texts],
        "wrong": None if points.wrong is None else [int(wrong) for wrong in points.wrong],
        "verdicts": [RIGHT, WRONG],
        "pictures": pictures,
    }
    here = files(__package__)
    style, code = (here.joinpath(f"scatter.{kind}").read_text("utf-8") for kind in ("css", "js"))
    return f"""<style>{style}</style>
<figure class="scatter"><script type="application/json">{embedded_json(data)}</script>
<noscript>The points are drawn by JavaScript, which is off.</noscript></figure>
<script>{code}</script>"""


def color_of(number: int) -> str:
    """Return the color of a class: one of a few distinct ones, and other hues where these are used up."""
    if number < len(_CLASSES):
        return _CLASSES[number]
    hue, light = number * _GOLDEN % 360, (38, 52, 66)[number % 3]
    return f"hsl({hue:.0f} 62% {light}%)"


def _short(values: Sequence[float]) -> list[float]:
    """Round to what a picture shows, which halves the page."""
    return [float(f"{value:.5g}") for value in values]
