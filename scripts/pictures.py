"""Draw the pictures of the README and the guide, docs/images/*.svg.

    samestep demo demo --json > docs/images/demo.json
    python scripts/pictures.py

They follow a reader's light or dark setting. demo.svg and curves.svg show what `samestep demo` measured; the others need
no measurement.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from samestep.report.lanes_drawing import COLORS, draw_lanes

IMAGES = Path(__file__).parents[1] / "docs" / "images"
_STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #1d2733 } .mono { font-family: ui-monospace, monospace; font-size: 13px }
.soft { fill: #6b7580 } .paper { fill: #ffffff } .frame { fill: #f6f8fa; stroke: #d5dce3 } .track { fill: #dfe5eb }
.bar { fill: #1f5f99 } .wire { fill: none; stroke: #8793a0; stroke-width: 1.5 } .good { fill: #12703c } .bad { fill: #b3261e } .grid { stroke: #e6ebf0 }
.c0 { stroke: #1f5f99 } .c1 { stroke: #c2571a } .c2 { stroke: #12703c } .c3 { stroke: #7a3e9d } .curve { fill: none }
@media (prefers-color-scheme: dark) {
text { fill: #e2e8ee } .soft { fill: #8d99a5 } .paper { fill: #12171c } .frame { fill: #1a2129; stroke: #36414c }
.track { fill: #303a44 } .wire { stroke: #71808e } .bar { fill: #6cb2f0 } .good { fill: #5cc48a } .bad { fill: #ff8a80 } .grid { stroke: #27303a }
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


def tree_picture(lanes: int = 8) -> str:
    """Return the tree in which lanes are added, and where ranks cut it."""
    parts: list[str] = []
    x = [70 + 90 * lane for lane in range(lanes)]
    levels = [x]
    while len(levels[-1]) > 1:
        pairs = zip(levels[-1][::2], levels[-1][1::2], strict=True)
        levels.append([(a + b) / 2 for a, b in pairs])
    for height, places in enumerate(levels[:-1]):
        for at, place in enumerate(places):
            up = levels[height + 1][at // 2]
            parts.append(
                f'<path class="wire" d="M{place:g},{230 - 60 * height} L{up:g},{230 - 60 * (height + 1) + 12}"/>'
            )
    for height, places in enumerate(levels):
        for at, place in enumerate(places):
            y = 230 - 60 * height
            if height == 0:
                parts.append(_box(place - 34, y - 14, 68, 28, COLORS[at % len(COLORS)], f"lane {at}"))
            else:
                parts.append(f'<circle class="frame" cx="{place:g}" cy="{y}" r="12"/>')
                parts.append(f'<text x="{place:g}" y="{y + 5}" text-anchor="middle">+</text>')
    for row, world in enumerate((1, 2, 4)):
        y = 270 + 34 * row
        each = lanes // world
        for rank in range(world):
            left, right = x[rank * each] - 38, x[rank * each + each - 1] + 38
            parts.append(f'<rect class="frame" x="{left}" y="{y}" width="{right - left}" height="26" rx="5"/>')
            words = "one process" if world == 1 else f"rank {rank}"
            parts.append(
                f'<text class="soft" x="{(left + right) / 2}" y="{y + 18}" text-anchor="middle">{words}</text>'
            )
    note = "A rank adds the lanes above it, and ranks exchange the rest. Every world size adds the same pairs."
    parts.append(_text(32, 396, note, "soft"))
    return _picture(parts, 770, 412)


def kill_picture() -> str:
    """Return a run on four ranks of which one is killed, and its resume on two."""
    parts = [_text(24, 30, "samples"), _text(24, 96, "4 ranks"), _text(24, 222, "2 ranks, resumed")]
    for step in range(10):
        left = 170 + 60 * step
        parts.append(_box(left, 14, 54, 24, COLORS[step % len(COLORS)], f"{step}"))
        for rank in range(4):
            if step < 6 and not (step == 5 and rank == 2):
                faint = ' opacity="0.35"' if step >= 4 else ""
                parts.append(_bar(left, 62 + 22 * rank, COLORS[step % len(COLORS)], faint))
        if step >= 4:
            parts += [_bar(left, 200 + 22 * rank, COLORS[step % len(COLORS)]) for rank in range(2)]
    parts.append(_text(472, 121, "✕ killed", "bad"))
    parts.append('<path class="wire" stroke-dasharray="4 4" d="M407,52 V250"/>')
    parts.append(_text(414, 176, "last checkpoint: steps 4 and 5 are computed again", "soft"))
    parts.append(
        _text(24, 284, "The resumed run reads the same samples and ends with the bits of a run that nobody killed.")
    )
    return _picture(parts, 800, 304)


def step_picture() -> str:
    """Return where the time of a step goes: one process, two ranks, a GPU with graphs."""
    rows = (
        ("one process", ["read", *["lane"] * 8, "update"]),
        ("rank 0 of 2", ["read", *["lane"] * 4, "exchange", "update"]),
        ("rank 1 of 2", ["read", *["lane"] * 4, "exchange", "update"]),
        ("a GPU with graphs", ["replay", "update"]),
    )
    widths = {"read": 44, "lane": 52, "exchange": 74, "update": 60, "replay": 200}
    colors = {"read": COLORS[7], "exchange": COLORS[1], "update": COLORS[3], "replay": COLORS[2]}
    parts = []
    for row, (name, phases) in enumerate(rows):
        y, left, lane = 24 + 46 * row, 160, 4 if name.startswith("rank 1") else 0
        parts.append(_text(24, y + 19, name))
        for phase in phases:
            words = {"lane": f"lane {lane}", "replay": "8 lanes, one graph"}.get(phase, phase)
            color = COLORS[0] if phase == "lane" else colors[phase]
            parts.append(_box(left, y, widths[phase] - 3, 28, color, words))
            left += widths[phase]
            lane += phase == "lane"
    note = "Each lane is a forward and a backward pass. Gradients are sent while the last lane is still computed."
    parts.append(_text(24, 226, note, "soft"))
    return _picture(parts, 760, 244)


def sweep_picture() -> str:
    """Return what a sweep consists of: trials, their folds, their ranks."""
    parts = [_box(24, 96, 110, 34, COLORS[7], "sweep")]
    for trial in range(3):
        y = 22 + 74 * trial
        parts.append(f'<path class="wire" d="M134,113 C170,113 170,{y + 17} 200,{y + 17}"/>')
        parts.append(_box(200, y, 130, 34, COLORS[trial], f"trial {trial}"))
        for fold in range(3):
            top = y - 16 + 22 * fold
            parts.append(f'<path class="wire" d="M330,{y + 17} C360,{y + 17} 360,{top + 9} 390,{top + 9}"/>')
            parts.append(_box(390, top, 110, 18, COLORS[trial], f"fold {fold}: a run"))
            parts += [_box(520 + 66 * rank, top, 60, 18, COLORS[4 + rank % 2], f"rank {rank}") for rank in range(2)]
    parts.append(_text(24, 262, "A trial's value is the mean of its folds, the same at any number of ranks.", "soft"))
    return _picture(parts, 680, 280)


def _box(x: float, y: float, width: float, height: float, color: str, words: str) -> str:
    middle = f'x="{x + width / 2:g}" y="{y + height / 2 + 4.5:g}" text-anchor="middle"'
    size = 11 if height < 24 else 13
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{color}"/>'
        f'<text {middle} style="fill: #1d2733; font-size: {size}px">{escape(words)}</text>'
    )


def _bar(x: float, y: float, color: str, more: str = "") -> str:
    return f'<rect x="{x}" y="{y}" width="54" height="16" rx="3" fill="{color}"{more}/>'


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
    return {
        "demo.svg": demo_picture(runs), "curves.svg": curves_picture(runs), "lanes.svg": lanes_picture(),
        "tree.svg": tree_picture(), "kill.svg": kill_picture(), "step.svg": step_picture(), "sweep.svg": sweep_picture(),
    }  # fmt: skip


if __name__ == "__main__":
    for name, picture in pictures().items():
        (IMAGES / name).write_text(picture, encoding="utf-8")
