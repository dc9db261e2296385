"""The page of results: what is the same, the curves, the loss scale, and pictures with their captions."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pictures import SIZE, draw
from trainings import Training

from samestep.models.embeddings.report import png
from samestep.report.chart import COLORS, Line, Panel, chart
from samestep.report.page import write_page
from samestep.report.table import html_table

GOAL = 0.9
"""Of held-out pictures, how many get exactly their caption after 1,000 steps."""
_WIDTHS = {1: 7, 2: 4, 4: 1.5}
"""Of lines that lie on each other: all of them can be seen."""
_STYLE = """<style>
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(14rem, 1fr)); gap: 1rem }
.pictures figure { margin: 0; font-size: .85rem } .pictures img { width: 128px; image-rendering: pixelated }
.pictures figcaption { line-height: 1.35 }
</style>"""


def write_results(
    fp16: Sequence[Training],
    bf16: Sequence[Training],
    resumed: Sequence[Training],
    planted: int,
    seconds: Mapping[str, float],
    path: Path,
) -> dict[str, Any]:
    """Write the page; the figures on it.

    Args:
        fp16: the trainings in fp16, one for each number of ranks.
        bf16: those in bf16.
        resumed: those that resumed a checkpoint of one of the first.
        planted: the step with the overflow, in fp16.
        seconds: how long each training took.
        path: the page.
    """
    figures = {
        "fp16": _figures(fp16), "bf16": _figures(bf16), "planted": planted,
        "skipped by all ranks": all(one.ranks_agree() and planted in one.skipped for one in fp16),
        "resumed": [
            {"world": one.world, "from": one.first, "scale": one.scales[0], "same": one.is_the_end_of(fp16[0])}
            for one in resumed
        ],
    }  # fmt: skip
    figures["same"] = (
        figures["fp16"]["same"] and figures["bf16"]["same"] and figures["skipped by all ranks"]
        and all(one["same"] for one in figures["resumed"])
    )  # fmt: skip
    body = f"""<h1>Captions of pictures in 16 bits</h1>
<p>A vision transformer and a text decoder, trained with <code>DistributedAMPTrainer</code> on 1, 2 and 4 ranks, in fp16 with
dynamic loss scaling and in bf16.</p>
{_summary(figures)}
<h2>Loss</h2>
<p>The lines of 1, 2 and 4 ranks lie on each other: they are of different widths so that all can be seen.</p>
{chart([_losses("fp16", fp16), _losses("bf16", bf16)], wide=True)}
<h2>Loss scale in fp16</h2>
{chart([_scales(fp16, resumed, planted)])}
<h2>Captions of held-out pictures</h2>
<p>No picture that was trained on has one of these captions. Below each picture what the model, trained in fp16, generates before and
after the training.</p>
{_pictures(fp16[0].captions)}
<h2>Time</h2>
{html_table(["training", "seconds"], [[name, f"{spent:.0f}"] for name, spent in seconds.items()])}"""
    write_page(path, "Captions of pictures in 16 bits", body, {"folder": str(path.parent)})
    return figures


def _figures(trainings: Sequence[Training]) -> dict[str, Any]:
    first = trainings[0]
    return {
        "worlds": [one.world for one in trainings],
        "steps": len(first.losses),
        "first loss": _mean(first.losses[0]),
        "last loss": _mean(first.losses[-1]),
        "weights": first.digest[:16],
        "scale": first.scales[-1],
        "skipped": first.skipped,
        "exact match before": first.captions["before"]["exact_match"],
        "exact match after": first.captions["after"]["exact_match"],
        "same": all(one.ranks_agree() and one.is_the_end_of(first) for one in trainings),
    }


def _mean(lanes: Sequence[float]) -> float:
    return math.fsum(lanes) / len(lanes)


def _verdict(kept: bool) -> str:
    return "identical" if kept else "DIFFERENT"


def _summary(figures: Mapping[str, Any]) -> str:
    rows: list[list[Any]] = []
    for kind in ("fp16", "bf16"):
        found = figures[kind]
        worlds = ", ".join(map(str, found["worlds"]))
        rows += [
            [f"{kind}: losses, scales and weights on {worlds} ranks", _verdict(found["same"]), "identical"],
            [f"{kind}: loss of the first and the last step", f"{found['first loss']:.4f}, {found['last loss']:.4f}", ""],
            [f"{kind}: held-out pictures with exactly their caption, before", f"{found['exact match before']:.3f}", ""],
            [f"{kind}: the same after training", f"{found['exact match after']:.3f}", f"at least {GOAL}"],
        ]  # fmt: skip
    rows.append(
        [
            f"fp16: overflow in one lane of step {figures['planted']}",
            "skipped by all ranks, and their scales agree"
            if figures["skipped by all ranks"]
            else "NOT skipped by all ranks",
            "skipped",
        ]
    )
    rows += [
        [
            f"fp16: saved at step {one['from']} on 2 ranks, resumed on {one['world']} with scale {one['scale']:g}",
            _verdict(one["same"]),
            "identical",
        ]
        for one in figures["resumed"]
    ]
    return html_table(["figure", "value", "goal"], rows)


def _line(one: Training, y: Sequence[float], color: str) -> Line:
    name = f"{one.world} rank{'s' if one.world > 1 else ''}"
    x = range(one.first + 1, one.first + 1 + len(y))
    width = _WIDTHS.get(one.world, 2)
    return Line(name=name, group=name, x=list(x), y=list(y), color=color, width=width)


def _losses(kind: str, trainings: Sequence[Training]) -> Panel:
    lines = [_line(one, [_mean(lanes) for lanes in one.losses], COLORS[number]) for number, one in enumerate(trainings)]
    return Panel(title=f"{kind}: cross entropy of a word", lines=lines, zero=True)


def _scales(fp16: Sequence[Training], resumed: Sequence[Training], planted: int) -> Panel:
    lines = [_line(one, one.scales, COLORS[number]) for number, one in enumerate(fp16)]
    for number, one in enumerate(resumed):
        name = f"resumed on {one.world}"
        first = [one.first + 1]
        lines.append(
            Line(
                name=name, group=name, x=first, y=[one.scales[0]], color=COLORS[len(fp16) + number], joined=False,
                mark="circle",
            )
        )  # fmt: skip
    note = {"x": planted + 1, "y": fp16[0].scales[planted], "text": "overflow"}
    exponents = range(math.floor(math.log2(min(fp16[0].scales))), math.ceil(math.log2(max(fp16[0].scales))) + 1)
    ticks = [2.0**exponent for exponent in exponents]
    return Panel(
        title="loss scale of each step", lines=lines, ylog=True, yticks=ticks,
        ylabels=[f"{tick:,.0f}" for tick in ticks], notes=[note],
    )  # fmt: skip


def _pictures(captions: Mapping[str, Any]) -> str:
    before, after = captions["before"], captions["after"]
    drawn, _ = draw(np.random.default_rng(1), len(after["captions"]), held_out=True)
    figures = []
    rows = zip(drawn, after["captions"], before["generated"], after["generated"], strict=True)
    for picture, truth, first, last in rows:
        data = base64.b64encode(png(picture.tobytes(), SIZE, SIZE)).decode("ascii")
        right = last == truth
        kind, told = ("kept", "") if right else ("broken", f"<br>drawn as: {html.escape(truth)}")
        figures.append(
            f'<figure><img src="data:image/png;base64,{data}" alt="{html.escape(truth)}"><figcaption>'
            f'before: {html.escape(first) or "nothing"}<br>after: <b class="{kind}">{html.escape(last)}</b>{told}'
            "</figcaption></figure>"
        )
    return f'{_STYLE}<div class="pictures">{"".join(figures)}</div>'
