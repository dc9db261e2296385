"""The result of a verification as text, as one self-contained HTML page, and as a small picture."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path

from samestep.report.chart import COLORS, Line, Panel, chart
from samestep.report.lanes_drawing import MOST_LANES, draw_lanes
from samestep.report.page import write_page
from samestep.report.picture import write_panels
from samestep.report.table import Cell, code, html_table, marked
from samestep.verify.compare import Verification, WorldResult
from samestep.words import counted

_PROMISES = {
    "bits": "identical bits: every loss, and every tensor of the final state",
    "rounding": "equal up to rounding: every loss, and the weights, within {rtol:g} relative",
    "samples": "the same samples in every step",
}

_VERDICTS = {"bits": "IDENTICAL", "rounding": "EQUAL UP TO ROUNDING", "samples": "SAME SAMPLES"}
_COLUMNS = ("ranks", "steps", "ms per step", "state", "result")


def promise(result: Verification) -> str:
    """Return what the config's level of sameness promises, as a phrase."""
    return _PROMISES[result.same].format(rtol=result.rtol)


def verdict(result: Verification) -> str:
    """`kept` or `NOT kept`."""
    return "kept" if result.kept else "NOT kept"


def verdict_words(result: Verification) -> str:
    """Return the verdict in capitals."""
    return _VERDICTS[result.same] if result.kept else "DIFFERENT"


def compared_words(result: Verification) -> str:
    """Return what was compared, and how many tensors differ."""
    steps, runs = counted(result.worlds[0].record.steps, "step"), counted(len(result.worlds), "run")
    return f"{result.different_tensors:,} of {counted(result.tensors, 'tensor')} differ after {steps}, in {runs}"


def write_report(
    result: Verification,
    title: str,
    path: Path,
    facts: Mapping[str, str] | None = None,
    lanes: int | None = None,
    ddp: Verification | None = None,
) -> None:
    """Write the certificate: the verdict, what was compared, the lanes on ranks, and the loss curves.

    Args:
        lanes: How many the runs have, if that does not depend on the world size.
        ddp: The same runs with DistributedDataParallel.
    """
    against = ""
    if result.against:
        words = "agrees" if result.against_difference is None else str(result.against_difference)
        against = f"<p>Against the given curve ({len(result.against)} steps): {html.escape(words)}.</p>"
    suspect = "" if result.suspect is None else f"<p>{html.escape(str(result.suspect))}</p>"
    labels = ", ".join(world.label for world in result.worlds)
    body = f"""<h1>{html.escape(title)}: one run on {html.escape(labels)} ranks?</h1>
{_certificate(result)}
<p><code>same: {html.escape(result.same)}</code> promises {html.escape(promise(result))}.
Compared with the run on {counted(html.escape(result.worlds[0].label), "rank")}.</p>
{html_table(_COLUMNS, [_row(world) for world in result.worlds], numbers=_COLUMNS[:3])}
{suspect}
{against}
{_lanes(result, lanes)}
{chart(_panels(result))}
{"" if ddp is None else _ddp(ddp)}"""
    write_page(path, f"samestep verify: {title}", body, facts)


def _certificate(result: Verification) -> str:
    hashes = {world.record.state_hash for world in result.worlds}
    found = f"<code>{html.escape(hashes.pop())}</code>" if len(hashes) == 1 else ""
    first = next((world for world in result.worlds if not world.kept), None)
    reason = result.against_difference if first is None else first
    why = "" if result.kept else f"<span>{html.escape(str(reason))}</span>"
    return f"""<div class="certificate {"kept" if result.kept else "broken"}"><strong>{verdict_words(result)}</strong>
{found}<span>{compared_words(result)}</span>{why}</div>"""


def _ddp(ddp: Verification) -> str:
    """Return what DistributedDataParallel makes of the same samples."""
    rows = [[world.label, code(world.record.state_hash), f"{world.record.losses[-1]:.9g}"] for world in ddp.worlds]
    states = counted(len({world.record.state_hash for world in ddp.worlds}), "different final state")
    return f"""<h2>Beside it: DistributedDataParallel</h2>
<p>The same config with <code>same: samples</code>, which has the same samples and plain DDP's arithmetic: {states}.</p>
{html_table(["ranks", "state", "last loss"], rows, numbers=["ranks", "last loss"])}
{chart(_panels(ddp))}"""


def _lanes(result: Verification, lanes: int | None) -> str:
    worlds = sorted({world.record.world for world in result.worlds})
    if lanes is None or lanes > MOST_LANES or not worlds or worlds[-1] > lanes:
        return ""
    return f"<h2>Lanes on ranks</h2>\n{draw_lanes(lanes, worlds)}"


def _row(world: WorldResult) -> list[str | Cell]:
    record = world.record
    result = marked(str(world), "kept" if world.kept else "broken")
    return [world.label, str(record.steps), f"{record.seconds_per_step * 1e3:.1f}", code(record.state_hash), result]


def _panels(result: Verification) -> list[Panel]:
    first, widest = result.worlds[0].record.losses, 2 + 2 * len(result.worlds)
    losses, gaps = [], []
    for number, world in enumerate(result.worlds):
        curve, name = world.record.losses, f"{counted(world.label, 'rank')}"
        color, steps = COLORS[number % len(COLORS)], range(len(curve))
        apart = [abs(a - b) / abs(a) if a else 0.0 for a, b in zip(first, curve, strict=False)]
        # Ever thinner, so that curves which coincide can all be seen.
        width = widest - 2 * number
        losses.append(Line(name=name, group=name, x=steps, y=curve, color=color, width=width))
        gaps.append(Line(name=name, group=name, x=range(len(apart)), y=apart, color=color))
    if result.against:
        name, steps = "given curve", range(len(result.against))
        losses.append(Line(name=name, group=name, x=steps, y=result.against, color=COLORS[-1], dash="dot"))
    difference = "difference from the first run, relative to its loss"
    return [
        Panel(title="loss", lines=losses, y="loss", height=360),
        Panel(title=difference, lines=gaps, y="relative", zero=True, height=220),
    ]


def write_picture(result: Verification, title: str, path: Path) -> None:
    """Draw the losses of all runs under the verdict.

    Raises:
        OutputError: It cannot be written.
        MissingExtraError: There is no matplotlib.
    """
    labels = ", ".join(world.label for world in result.worlds)
    heading = f"{title} on {labels} ranks: {verdict_words(result)}. {compared_words(result)}"
    write_panels(heading, _panels(result), path, force=True)
