"""Draw the pictures of the README and the guide: docs/images/demo.svg, curves.svg and lanes.svg.

    samestep demo demo --json > docs/images/demo.json
    python scripts/pictures.py

They follow a reader's light or dark setting. demo.svg and curves.svg show what `samestep demo` measured; lanes.svg needs
no measurement.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from samestep.report.lanes_drawing import draw_lanes

IMAGES = Path(__file__).parents[1] / "docs" / "images"
_STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #1d2733 } .mono { font-family: ui-monospace, monospace; font-size: 13px }
.soft { fill: #6b7580 } .paper { fill: #ffffff } .frame { fill: #f6f8fa; stroke: #d5dce3 } .track { fill: #dfe5eb }
.bar { fill: #1f5f99 } .good { fill: #12703c } .bad { fill: #b3261e } .grid { stroke: #e6ebf0 }
.c0 { stroke: #1f5f99 } .c1 { stroke: #c2571a } .c2 { stroke: #12703c } .c3 { stroke: #7a3e9d } .curve { fill: none }
@media (prefers-color-scheme: dark) {
text { fill: #e2e8ee } .soft { fill: #8d99a5 } .paper { fill: #12171c } .frame { fill: #1a2129; stroke: #36414c }
.track { fill: #303a44 } .bar { fill: #6cb2f0 } .good { fill: #5cc48a } .bad { fill: #ff8a80 } .grid { stroke: #27303a }
.c0 { stroke: #6cb2f0 } .c1 { stroke: #ff9b5a } .c2 { stroke: #5cc48a } .c3 { stroke: #c99bf0 } }
</style>"""
_ROW, _SECONDS_SHOWN = 28, 12.0


def demo_picture(runs: Sequence[dict[str, Any]]) -> str:
    """Return the demo as it runs, in a loop: bars that fill, then each run's loss and final state."""
    total = sum(run["seconds"] for run in runs)
    loop = _SECONDS_SHOWN + 5
    width, height = 860, 96 + _ROW * len(runs)
    parts = [f'<rect class="frame" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="8"/>']
    parts.append(_text(24, 34, "$ samestep demo", "mono"))
    began = 0.0
    for at, run in enumerate(runs):
        y = 70 + _ROW * at + (14 if run["by"] != runs[0]["by"] else 0)
        start = began / total * _SECONDS_SHOWN
        began += run["seconds"]
        end = began / total * _SECONDS_SHOWN
        first = next(other for other in runs if other["by"] == run["by"])
        mark = "good" if run["state"] == first["state"] else "bad"
        if run is first:
            parts.append(_text(24, y, run["by"], "mono soft"))
        parts.append(_text(124, y, run["run"], "mono"))
        parts.append(f'<rect class="track" x="438" y="{y - 9}" width="120" height="7" rx="3"/>')
        parts.append(
            f'<rect class="bar" x="438" y="{y - 9}" width="120" height="7" rx="3">'
            f"{_animated('width', [(0, 0), (start, 0), (end, 120), (loop, 120)], loop)}</rect>"
        )
        shown = _animated("opacity", [(0, 0), (end, 0), (end + 0.2, 1), (loop, 1)], loop)
        parts.append(_text(580, y, f"{fmean(run['losses'][-len(run['losses']) // 3 :]):.9f}", "mono", shown))
        parts.append(_text(692, y, run["state"][:16], f"mono {mark}", shown))
    return _picture(parts, width, height)


def curves_picture(runs: Sequence[dict[str, Any]]) -> str:
    """Return the loss curves of plain DDP beside those of samestep."""
    parts: list[str] = []
    values = [loss for run in runs for loss in run["losses"]]
    low, high = min(values), max(values)
    for place, by in enumerate(("plain DDP", "samestep")):
        found = [run for run in runs if run["by"] == by]
        states = len({run["state"] for run in found})
        left, top, width, height = 52 + 420 * place, 56, 350, 220
        title = f"{by}: {len(found)} runs, {states} result{'s' if states > 1 else ''}"
        parts.append(_text(left, 30, title, "good" if states == 1 else "bad"))
        for share in (0.0, 0.5, 1.0):
            y = top + height * (1 - share)
            parts.append(f'<line class="grid" x1="{left}" y1="{y}" x2="{left + width}" y2="{y}"/>')
            parts.append(_text(left - 36, y + 4, f"{low + share * (high - low):.2f}", "soft"))
        for number, run in enumerate(found):
            steps = len(run["losses"]) - 1
            points = " ".join(
                f"{left + width * step / steps:.1f},{top + height * (high - loss) / (high - low):.1f}"
                for step, loss in enumerate(run["losses"])
            )
            thick = 1.1 * (len(found) - number) if states == 1 else 1.6
            parts.append(f'<polyline class="curve c{number}" stroke-width="{thick:.1f}" points="{points}"/>')
            parts.append(
                f'<rect class="c{number}" x="{left + 130 * (number % 3)}" y="{298 + 22 * (number // 3)}" width="12"'
            )
            parts[-1] += ' height="3" fill="none" stroke-width="3"/>'
            name = run["run"] if len(run["run"]) < 12 else "4 ranks, a kill, 2 ranks"
            parts.append(_text(left + 20 + 130 * (number % 3), 304 + 22 * (number // 3), name, "soft"))
    return _picture(parts, 860, 340)


def lanes_picture(lanes: int = 8, worlds: Sequence[int] = (1, 2, 3, 8)) -> str:
    """Return the lanes of one global batch, and the ranks that they are on at several world sizes."""
    height = 88 + 58 * len(worlds)
    note = "Samples, dropout and BatchNorm belong to lanes. Their sums are added in one fixed tree."
    inside = draw_lanes(lanes, worlds).replace("<svg ", '<svg x="24" y="8" ', 1)
    return _picture([inside, _text(28, height + 16, note, "soft")], 760, height + 36)


def _animated(what: str, moments: Sequence[tuple[float, float]], loop: float) -> str:
    times = ";".join(f"{min(at / loop, 1):.4f}" for at, _ in moments)
    values = ";".join(f"{value:g}" for _, value in moments)
    return f'<animate attributeName="{what}" dur="{loop}s" begin="-{_SECONDS_SHOWN + 1}s" repeatCount="indefinite" keyTimes="{times}" values="{values}"/>'


def _text(x: float, y: float, text: str, kind: str = "", inside: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}{inside}</text>'


def _picture(parts: Sequence[str], width: float, height: float) -> str:
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    paper = '<rect class="paper" width="100%" height="100%"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', _STYLE, paper, *parts, "</svg>\n"])


def pictures() -> dict[str, str]:
    """Return the pictures, by the names of their files."""
    runs = json.loads((IMAGES / "demo.json").read_text(encoding="utf-8"))["runs"]
    return {"demo.svg": demo_picture(runs), "curves.svg": curves_picture(runs), "lanes.svg": lanes_picture()}


if __name__ == "__main__":
    for name, picture in pictures().items():
        (IMAGES / name).write_text(picture, encoding="utf-8")
