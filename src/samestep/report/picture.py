"""The panels of a page as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import refuse_existing, replacing
from samestep.errors import MissingExtraError, OutputError
from samestep.report.chart import Line, Panel

_SUFFIXES = (".png", ".svg", ".pdf")

_STYLES = {"": "-", "dash": "--", "dot": ":"}
_MARKS = {"": None, "circle": "o", "star": "*"}
_SIZES = {"": 4, "circle": 5, "star": 13}
_FAINT = 0.3
"""Opacity of a line under its running mean."""
_FEWEST_SMOOTHED = 20
"""Points of a line that has a running mean; also in chart.js."""
_INCHES = 1 / 95
"""Inches per pixel of a panel."""


def refuse_picture(path: Path, force: bool) -> None:
    """Refuse what cannot be a picture, or is a file already; before the work of a command."""
    if path.suffix.lower() not in _SUFFIXES:
        page = "; for a page, --report FILE" if path.suffix.lower() in (".html", ".htm") else ""
        raise OutputError(f"{path}: end its name in {', '.join(_SUFFIXES)}{page}")
    if not force:
        refuse_existing(path)


def write_panels(title: str, panels: Sequence[Panel], path: Path, force: bool = False) -> None:
    """Draw panels two by two, and those of the full width by themselves.

    Args:
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
    figure.suptitle(_literal(title), fontsize=12)
    grid = GridSpec(len(rows), 2, figure=figure, height_ratios=heights)
    entries: dict[str, Any] = {}
    for at, row in enumerate(rows):
        for column, panel in enumerate(row):
            place = grid[at, :] if panel.full else grid[at, column]
            _draw(figure.add_subplot(place), panel, entries)
    figure.legend(
        list(entries.values()), [_literal(name) for name in entries], loc="outside lower center",
        ncols=6, frameon=False, fontsize=9,
    )  # fmt: skip
    _save(figure, path)


def _rows(panels: Sequence[Panel]) -> list[list[Panel]]:
    rows: list[list[Panel]] = []
    for panel in panels:
        if rows and len(rows[-1]) == 1 and not panel.full and not rows[-1][0].full:
            rows[-1].append(panel)
        else:
            rows.append([panel])
    return rows


def _draw(axes: Any, panel: Panel, entries: dict[str, Any]) -> None:
    axes.set_title(_literal(panel.title), fontsize=10)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_xlabel(_literal(panel.x), fontsize=8)
    axes.set_ylabel(_literal(panel.y), fontsize=8)
    axes.tick_params(labelsize=8)
    if panel.xlog:
        axes.set_xscale("log")
    if panel.ylog:
        axes.set_yscale("log")
    for line in panel.lines:
        smooths = panel.smooth and len(line.x) >= _FEWEST_SMOOTHED
        drawn = _line(axes, replace(line, opacity=_FAINT) if smooths else line)
        if panel.smooth and smooths:
            drawn = _line(axes, replace(line, y=_smoothed(line.y, panel.smooth), low=None, high=None, flags=()))
        if line.group:
            entries.setdefault(line.group, drawn)
    for ticks, labels, put in (
        (panel.xticks, panel.xlabels, axes.set_xticks),
        (panel.yticks, panel.ylabels, axes.set_yticks),
    ):
        if ticks is not None:
            # In plain numbers: a logarithmic axis would name powers of ten only.
            put(list(ticks), [f"{tick:g}" for tick in ticks] if labels is None else list(map(_literal, labels)))
            put([], minor=True)
    if panel.xrange is not None:
        axes.set_xlim(*panel.xrange)
    if panel.yrange is not None:
        axes.set_ylim(*panel.yrange)
    for note in panel.notes:
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1}
        axes.annotate(
            _literal(note["text"]), (note["x"], note["y"]), xytext=(4, 0), fontsize=8, va="center",
            textcoords="offset points", bbox=box,
        )  # fmt: skip


def _smoothed(values: Sequence[float | None], weight: float) -> list[float | None]:
    """Return running means, in which the first values weigh as much as the later ones."""
    mean, total = 0.0, 0.0
    found: list[float | None] = []
    for value in values:
        if value is not None:
            mean, total = weight * mean + (1 - weight) * value, weight * total + 1 - weight
        found.append(None if value is None else mean / total)
    return found


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _bars(axes: Any, line: Line) -> Any:
    tops = _gaps(line.y)
    base = [0.0] * len(tops) if line.base is None else list(line.base)
    whiskers = None
    if line.low is not None and line.high is not None:
        ends = zip(tops, _gaps(line.low), _gaps(line.high), strict=True)
        # Of two figures that round differently one may lie beyond the other's end by a bit.
        whiskers = list(zip(*((max(0.0, y - low), max(0.0, high - y)) for y, low, high in ends), strict=True))
    return axes.bar(
        list(line.x), [top - begin for top, begin in zip(tops, base, strict=True)], line.bar,
        bottom=base, color=line.color, alpha=line.opacity, yerr=whiskers, capsize=3,
        ecolor="#1d2733",
    )  # fmt: skip


def _line(axes: Any, line: Line) -> Any:
    if line.bar:
        return _bars(axes, line)
    gaps = _gaps(line.y)
    if line.low is not None and line.high is not None:
        axes.fill_between(list(line.x), _gaps(line.low), _gaps(line.high), color=line.color, alpha=0.18, linewidth=0)
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


def _save(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib: whole, or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, synced=False) as partial:
            figure.savefig(partial, format=path.suffix[1:].lower())
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None


def _literal(name: str) -> str:
    """Return a name as it is: matplotlib takes dollars for formulas, and hides what begins with _."""
    text = name.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
