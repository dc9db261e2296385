"""The panels of a page as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samestep.errors import MissingExtraError
from samestep.plotting.picture import literal, refuse_picture, save_figure
from samestep.ui.chart import Line, Panel

_STYLES = {"": "-", "dash": "--", "dot": ":"}
_MARKS = {"": None, "circle": "o", "star": "*"}
_SIZES = {"": 4, "circle": 5, "star": 13}
_INCHES = 1 / 95
"""Of a panel's pixel."""


def write_panels(title: str, panels: Sequence[Panel], path: Path, force: bool = False) -> None:
    """Draw panels two by two, and those of the full width by themselves.

    Args:
        title: Of the picture.
        panels: What is drawn, each on axes of its own.
        path: The file, in .png, .svg or .pdf.
        force: Whether a file that is there is replaced.

    Raises:
        OutputError: if it is there, or cannot be written.
        MissingExtraError: without matplotlib.
    """
    refuse_picture(path, force)
    try:
        from matplotlib.figure import Figure
        from matplotlib.gridspec import GridSpec
    except ImportError:
        raise MissingExtraError("the picture", "plots") from None
    rows = _rows(panels)
    heights = [max(panel.height for panel in row) * _INCHES for row in rows]
    # Without pyplot: this needs no display and changes no global state.
    figure = Figure(figsize=(12.8, sum(heights) + 0.9), dpi=110, layout="constrained")
    figure.suptitle(literal(title), fontsize=12)
    grid = GridSpec(len(rows), 2, figure=figure, height_ratios=heights)
    entries: dict[str, Any] = {}
    for at, row in enumerate(rows):
        for column, panel in enumerate(row):
            place = grid[at, :] if panel.full else grid[at, column]
            _draw(figure.add_subplot(place), panel, entries)
    figure.legend(
        list(entries.values()), [literal(name) for name in entries], loc="outside lower center",
        ncols=6, frameon=False, fontsize=9,
    )  # fmt: skip
    save_figure(figure, path)


def _rows(panels: Sequence[Panel]) -> list[list[Panel]]:
    rows: list[list[Panel]] = []
    for panel in panels:
        if rows and len(rows[-1]) == 1 and not panel.full and not rows[-1][0].full:
            rows[-1].append(panel)
        else:
            rows.append([panel])
    return rows


def _draw(axes: Any, panel: Panel, entries: dict[str, Any]) -> None:
    axes.set_title(literal(panel.title), fontsize=10)
    axes.grid(alpha=0.25)
    axes.set_xlabel(literal(panel.x), fontsize=8)
    axes.set_ylabel(literal(panel.y), fontsize=8)
    axes.tick_params(labelsize=8)
    if panel.xlog:
        axes.set_xscale("log")
    if panel.ylog:
        axes.set_yscale("log")
    for line in panel.lines:
        drawn = _line(axes, line)
        if line.group:
            entries.setdefault(line.group, drawn)
    for ticks, labels, put in (
        (panel.xticks, panel.xlabels, axes.set_xticks),
        (panel.yticks, panel.ylabels, axes.set_yticks),
    ):
        if ticks is not None:
            put(list(ticks), None if labels is None else [literal(text) for text in labels])
    if panel.xrange is not None:
        axes.set_xlim(*panel.xrange)
    if panel.yrange is not None:
        axes.set_ylim(*panel.yrange)
    for note in panel.notes:
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1}
        axes.annotate(
            literal(note["text"]), (note["x"], note["y"]), xytext=(4, 0), fontsize=8, va="center",
            textcoords="offset points", bbox=box,
        )  # fmt: skip


def _line(axes: Any, line: Line) -> Any:
    gaps = [float("nan") if value is None else value for value in line.y]
    marker = _MARKS[line.mark] or ("o" if len(gaps) == 1 else None)
    (drawn,) = axes.plot(
        list(line.x), gaps, color=line.color, alpha=line.opacity, linewidth=line.width,
        linestyle=_STYLES[line.dash] if line.joined else "none", marker=marker,
        markersize=_SIZES[line.mark], solid_capstyle="butt",
    )  # fmt: skip
    if line.flags:
        (drawn,) = axes.plot(
            [flag["x"] for flag in line.flags], [0.03] * len(line.flags), "^", color=line.color,
            markersize=6, markeredgecolor="white", transform=axes.get_xaxis_transform(),
        )  # fmt: skip
    return drawn
