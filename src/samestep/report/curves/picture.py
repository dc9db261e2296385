"""The curves of runs as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import partial_of, refuse_existing
from samestep.errors import MissingExtraError, OutputError
from samestep.report.curves.panels import Curve, CurvePanel

_COLUMNS, _SUFFIXES = 2, (".png", ".svg", ".pdf")


def refuse_picture(path: Path, force: bool) -> None:
    """Refuse what cannot be a picture, or is a file already; before the work of a command."""
    if path.suffix.lower() not in _SUFFIXES:
        page = "; for a page, --report FILE" if path.suffix.lower() in (".html", ".htm") else ""
        raise OutputError(f"{path}: end its name in {', '.join(_SUFFIXES)}{page}")
    if not force:
        refuse_existing(path)


def write_picture(panels: Sequence[CurvePanel], path: Path, force: bool = False) -> None:
    """Draw the curves; the file's name says as what.

    Args:
        panels: what is drawn.
        path: the file, in .png, .svg or .pdf.
        force: whether a file that is there is replaced.

    Raises:
        OutputError: if it is there, or cannot be written.
        MissingExtraError: without matplotlib.
    """
    refuse_picture(path, force)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("the picture", "plots") from None
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    # Without pyplot: this needs no display and changes no global state.
    figure = Figure(figsize=(6.4 * columns, 3.1 * rows + 0.5), dpi=130, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    entries: dict[str, Any] = {}
    for panel, place in zip(panels, axes, strict=False):
        place.set_title(literal(panel.title), fontsize=10)
        place.grid(alpha=0.25)
        place.set_xlabel("step", fontsize=8)
        if panel.log:
            place.set_yscale("log")
        for curve in panel.curves:
            entries.setdefault(curve.run, _draw(place, curve))
    for place in axes[len(panels) :]:
        place.set_axis_off()
    names = [literal(name) for name in entries]
    figure.legend(
        list(entries.values()), names, loc="outside upper left", ncols=4, frameon=False, fontsize=9
    )
    save_figure(figure, path)


def _draw(axes: Any, curve: Curve) -> Any:
    points = curve.points
    gaps = [float("nan") if value is None else value for value in points.y]
    alone = "o" if len(gaps) == 1 else None
    (line,) = axes.plot(
        points.x, gaps, color=curve.color, linewidth=1.5, linestyle=curve.style, marker=alone
    )
    if points.low is not None and points.high is not None:
        low, high = ([float("nan") if v is None else v for v in side] for side in (points.low, points.high))  # fmt: skip
        axes.fill_between(points.x, low, high, color=curve.color, alpha=0.18, linewidth=0)
    if curve.flags:
        # At the bottom of the panel, whatever its values are.
        axes.plot(
            [flag.step for flag in curve.flags], [0.03] * len(curve.flags), "^", color=curve.color,
            markersize=6, markeredgecolor="white", transform=axes.get_xaxis_transform(),
        )  # fmt: skip
    return line


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib: whole, or not at all."""
    partial = partial_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            figure.savefig(partial, format=path.suffix[1:].lower())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None


def literal(name: str) -> str:
    """A name as it is: matplotlib takes dollars for formulas, and hides what begins with _."""
    text = name.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
