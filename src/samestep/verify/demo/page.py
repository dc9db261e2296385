"""The demo's result as a self-contained page."""

from __future__ import annotations

from pathlib import Path

from samestep.report.chart import COLORS, Line, Panel, chart
from samestep.report.page import write_page
from samestep.report.table import Cell, code, html_table, marked
from samestep.verify.demo.runs import DDP, SAMESTEP, Demo, DemoRun

_TITLE = "The same run at any size"


def write_demo_page(demo: Demo, path: Path) -> None:
    """Write the page: both verdicts, all runs, and the loss curves side by side."""
    kept = "kept" if demo.is_same else "broken"
    body = f"""<h1>{_TITLE}</h1>
<p>One training, a network with BatchNorm and dropout, on 1, 2 and 4 ranks. By <b>samestep</b> also on 4 ranks of which one
is killed in the middle, resumed on 2. All runs of a panel read the same samples in every step.</p>
<p><b class="{kept}">samestep: {_states(demo, SAMESTEP)}{"" if demo.is_same else ", and they should be the same"}.</b>
{DDP}: {_states(demo, DDP)}.</p>
{chart([_panel(demo, DDP), _panel(demo, SAMESTEP)], wide=True)}
{html_table(("", "run", "loss, last epoch", "final state"), [_row(run, demo) for run in demo.runs])}
<p>The state of plain DDP is its weights; samestep's includes the optimizer. Plain DDP differs since each rank normalises over its own samples, draws its own dropout, and sums gradients in an
order that depends on the number of ranks. samestep cuts every batch into the same lanes, whichever rank computes them.</p>
<p>Here each of four lanes has 16 samples, as a rank of plain DDP on 4 ranks has: BatchNorm over a few samples is noisier.
<code>batchnorm: global</code> normalises over all 64, at any world size.</p>
<p>Now your own training: <code>samestep verify config.yaml</code>, or <code>samestep verify train.py</code>.</p>"""
    write_page(path, f"samestep demo: {_TITLE.lower()}", body, {"project": str(demo.config.parent)})


def _states(demo: Demo, by: str) -> str:
    runs, states = len(demo.of(by)), demo.different(by)
    return f"{runs} runs, {states} final state{'s' if states > 1 else ''}"


def _row(run: DemoRun, demo: Demo) -> list[str | Cell]:
    first = demo.of(run.by)[0]
    same = run.is_same(first)
    name = marked(run.by, "short")
    mark = "kept" if same else "broken"
    state = Cell(code(run.state[:16]).html + ("" if run is first else f" {'identical' if same else 'different'}"), mark)
    return [name, run.name, f"{run.loss:.9f}", state]


def _panel(demo: Demo, by: str) -> Panel:
    runs = demo.of(by)
    lines = []
    for number, run in enumerate(runs):
        # Ever thinner, so that curves which coincide can all be seen.
        width = 1.3 * (len(runs) - number) if by == SAMESTEP else 1.6
        steps = range(len(run.losses))
        lines.append(Line(name=run.name, group=run.name, x=steps, y=run.losses, color=COLORS[number], width=width))
    return Panel(title=f"{by}: {_states(demo, by)}", lines=lines, y="loss", height=320)
