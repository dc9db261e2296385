"""The certificate of a verification as a small picture, to show to others."""

from __future__ import annotations

from pathlib import Path

from samestep.errors import MissingExtraError
from samestep.report.chart import COLORS
from samestep.report.picture import literal_text, refuse_picture, save_figure
from samestep.verify.report import compared_words, verdict_words
from samestep.verify.result import Verification
from samestep.version import __version__

_GOOD, _BAD, _INK, _SOFT = "#12703c", "#b3261e", "#1d2733", "#4a5663"


def write_card(result: Verification, title: str, path: Path) -> None:
    """Draw the verdict, the hash, what was compared, and the loss of every run.

    Raises:
        OutputError: If it cannot be written.
        MissingExtraError: Without matplotlib.
    """
    refuse_picture(path, force=True)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("the picture", "plots") from None
    color = _GOOD if result.kept else _BAD
    figure = Figure(figsize=(10, 5), dpi=120, facecolor="white")
    hashes = {world.record.state_hash for world in result.worlds}
    labels = ", ".join(world.label for world in result.worlds)
    lines = (
        (0.86, 15, _INK, f"{title} on {labels} ranks", "normal"),
        (0.68, 34, color, verdict_words(result), "bold"),
        (0.57, 15, _INK, hashes.pop() if len(hashes) == 1 else f"{len(hashes)} different states", "normal"),
        (0.47, 11, _SOFT, compared_words(result), "normal"),
        (0.06, 9, _SOFT, f"samestep {__version__}: samestep verify", "normal"),
    )
    for y, size, ink, text, weight in lines:
        figure.text(0.05, y, literal_text(text), fontsize=size, color=ink, weight=weight)
    axes = figure.add_axes((0.09, 0.15, 0.86, 0.25))
    for number, world in enumerate(result.worlds):
        width = 1.2 + 1.6 * (len(result.worlds) - 1 - number)  # ever thinner: curves that coincide are all seen
        axes.plot(world.record.losses, color=COLORS[number % len(COLORS)], linewidth=width)
    axes.set_ylabel("loss", fontsize=9, color=_SOFT)
    axes.tick_params(labelsize=8, colors=_SOFT)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
