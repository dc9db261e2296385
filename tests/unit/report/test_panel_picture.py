"""Panels as a picture: bands and bars, which an SVG names by their colors."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.report.chart import Line, Panel
from samestep.report.picture import write_panels

pytest.importorskip("matplotlib")


def test_bands_and_stacked_bars_are_drawn(tmp_path: Path) -> None:
    band = Line(
        name="a", group="a", x=[1, 2, 4], y=[1.0, None, 0.8], low=[0.9, None, 0.7],
        high=[1.1, None, 0.9], color="#123456",
    )  # fmt: skip
    lower = Line(name="b", group="b", x=[0, 1], y=[2.0, 3.0], bar=0.6, color="#abcdef")
    upper = Line(
        name="c", group="c", x=[0, 1], y=[5.0, 7.0], base=[2.0, 3.0], bar=0.6, color="#fedcba",
        low=[4.0, 7.0], high=[6.0, 8.0],
    )  # fmt: skip
    panels = [
        Panel(title="curve", lines=[band], xlog=True, xticks=[1, 2, 4]),
        Panel(title="bars", lines=[lower, upper], xticks=[0, 1], xlabels=["one", "two"]),
    ]
    path = tmp_path / "made.svg"
    write_panels("made", panels, path)
    text = path.read_text(encoding="utf-8")
    assert text.count("#abcdef") >= 2, "two bars"
    assert text.count("#fedcba") >= 2
    assert "fill: #123456; fill-opacity: 0.18" in text, "the band"
