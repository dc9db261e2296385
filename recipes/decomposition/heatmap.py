"""Matrices as pictures: importances in one colour, weights in two."""

from __future__ import annotations

import base64
import html

import numpy as np
from torch import Tensor

from samestep.models.embeddings.report import png

_ONE, _POSITIVE, _NEGATIVE = (31, 95, 153), (179, 38, 30), (31, 95, 153)
_CELL, _WIDEST = 14, 420
"""Pixels of a cell, and of the widest picture."""


def colours(values: np.ndarray, signed: bool) -> np.ndarray:
    """White for 0, and full colour for the largest; 1 is the largest importance.

    Args:
        values: (rows, columns).
        signed: whether they are weights, red above 0 and blue below; else importances from 0 to 1.
    """
    most = float(np.abs(values).max()) if signed else 1.0
    share = np.clip(np.abs(values) / (most or 1.0), 0, 1)[..., None]
    full = np.where((values < 0)[..., None], _NEGATIVE, _POSITIVE) if signed else np.array(_ONE)
    return (255 + share * (full - 255.0)).round().astype(np.uint8)


def heatmap(title: str, values: Tensor, rows: str, columns: str, signed: bool = False) -> str:
    """Return the HTML of a matrix.

    Args:
        title: above it.
        values: (rows, columns).
        rows: what a row is.
        columns: what a column is.
        signed: whether they are weights.
    """
    pixels = colours(values.detach().double().numpy(), signed)
    height, width = pixels.shape[:2]
    data = base64.b64encode(png(pixels.tobytes(), width, height)).decode("ascii")
    cell = min(_CELL, _WIDEST / width)
    most = f", full colour is {float(values.detach().abs().max()):.2g}" if signed else ""
    return (
        f'<figure class="map"><figcaption>{html.escape(title)}</figcaption><img src="data:image/png;base64,{data}" '
        f'style="width:{width * cell:.0f}px;height:{height * max(cell, 4):.0f}px" alt="{html.escape(title)}">'
        f"<figcaption>{height} {html.escape(rows)} by {width} {html.escape(columns)}{most}</figcaption></figure>"
    )


STYLE = """<style>
.maps { display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-items: flex-end; margin: 1rem 0 }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(26rem, 1fr)); gap: 0 1rem }
.map { margin: 0; font-size: .85rem } .map img { image-rendering: pixelated; border: 1px solid #dde3ea; max-width: 100% }
</style>"""


def side_by_side(maps: list[str]) -> str:
    return f'<div class="maps">{"".join(maps)}</div>'
