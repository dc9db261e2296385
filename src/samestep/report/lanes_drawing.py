"""The lanes of a global batch, drawn on the ranks that compute them, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from samestep.lanes.plan import deal_lanes

COLORS = ("#9cc4ea", "#f3b98b", "#a4d3b1", "#cdb2e4", "#f0a8a3", "#9ad3d8", "#e0cd84", "#c3cbd3")
MOST_LANES = 32
"""More would be too narrow to see."""
_LEFT, _WIDTH, _ROW = 130, 576, 58


def draw_lanes(lanes: int, worlds: Sequence[int]) -> str:
    """Return an SVG element with a row per world size.

    Its texts have the class `soft`, and the ranks' boxes `frame`; the page gives them their colours.
    """
    each = _WIDTH / lanes
    parts = [_text(0, 30, "global batch")]
    for lane in range(lanes):
        parts.append(_box(_LEFT + lane * each, 10, each - 4, 30, COLORS[lane % len(COLORS)]))
        if lanes <= 8:
            middle = _LEFT + lane * each + each / 2 - 2
            parts.append(f'<text x="{middle:g}" y="30" text-anchor="middle" style="fill: #1d2733">lane {lane}</text>')
    for y, world in zip(count(72, _ROW), worlds, strict=False):
        parts.append(_text(0, y + 24, "1 process" if world == 1 else f"{world} ranks"))
        for rank, mine in enumerate(deal_lanes(lanes, world)):
            x = _LEFT + mine.start * each
            parts.append(
                f'<rect class="frame" x="{x - 3:g}" y="{y - 3}" width="{len(mine) * each + 2:g}" height="42" rx="5"/>'
            )
            parts += [_box(_LEFT + lane * each, y + 2, each - 4, 16, COLORS[lane % len(COLORS)]) for lane in mine]
            if len(mine) * each > 50:
                parts.append(_text(x + 2, y + 34, f"rank {rank}"))
    width, height = _LEFT + _WIDTH + 4, 72 + _ROW * len(worlds)
    return f'<svg class="lanes" viewBox="-4 0 {width} {height}" width="{width}">{"".join(parts)}</svg>'


def _box(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{color}"/>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text class="soft" x="{x:g}" y="{y:g}">{text}</text>'
