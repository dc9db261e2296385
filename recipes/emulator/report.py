"""The page of results: figures, curves, predictions and Jacobians beside the truth, ranks, C++."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fields import INPUTS, OUTPUTS, true_state
from torch import Tensor

from samestep.models.trained_model import load_trained
from samestep.report.chart import COLORS, Line, Panel, chart
from samestep.report.page import write_page
from samestep.report.table import html_table

GOALS = {"rmse_aice": 0.03, "rmse_vice": 0.05}
"""The noise of the made-up fields is 0.01."""
POINTS = 400
"""Patterns in the plots."""
Rows = list[dict[str, Any]]


def write_results(
    folder: Path, proof: Mapping[str, Any], compared: Mapping[str, Any] | None, seconds: Mapping[str, float], path: Path
) -> None:
    """Write the page.

    Args:
        folder: where the data and the runs are.
        proof: what `verify --json` printed.
        compared: what `compare_cpp.py --json` printed; None if it was not run.
        seconds: how long each command took.
        path: the page.
    """
    rows, still = (rows_of(folder / "runs" / name) for name in ("emulator", "still"))
    found = Found.of(folder)
    body = f"""<h1>An emulator of sea ice</h1>
<p>From {len(INPUTS)} numbers of a cell of the grid to area and volume of its ice. The fields are made up, so that what is learnt
can be compared with what is true. All figures are of times that were not trained on.</p>
{_figures(rows, found)}
<h2>Training</h2>
{chart(_training_panels(rows), wide=True)}
<h2>The Jacobian</h2>
{chart(_jacobian_panels(rows), wide=True)}
<h2>Predictions and Jacobians beside the truth</h2>
{chart(found.panels(), wide=True)}
<h2>A run that ends when the Jacobian is still</h2>
<p>{html.escape(_ended(folder / "runs" / "still"))}</p>
{chart(_still_panels(still), wide=True)}
<h2>Ranks</h2>
{_ranks(proof, folder)}
<h2>C++</h2>
{_cpp(compared)}
<h2>Time</h2>
{_times(seconds)}"""
    write_page(path, "An emulator of sea ice", body, {"folder": str(folder)})


def rows_of(run: Path) -> Rows:
    """Return what a run has logged."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


class Found:
    """The trained emulator on validation patterns, and the truth there."""

    def __init__(self, x: Tensor, predicted: Tensor, jacobian: Tensor) -> None:
        self.predicted, self.jacobian = predicted, jacobian
        self.true = true_state(x.double())
        wide = x.double().requires_grad_(True)
        states = true_state(wide)
        self.true_jacobian = torch.stack(
            [torch.autograd.grad(column.sum(), wide, retain_graph=True)[0] for column in states.unbind(1)], 1
        )

    @classmethod
    def of(cls, folder: Path) -> Found:
        files = [f"params.{name}={folder / 'data' / name}.nc" for name in ("atmosphere", "ocean")]
        trained: Any = load_trained(folder / "runs" / "emulator", overrides=files)
        data = trained.task.valid_data()
        count = min(POINTS, len(data))
        chosen = [place * len(data) // count for place in range(count)]
        x, _ = trained.task.collate(data.__getitems__(chosen))
        model = trained.model
        # Per standard deviation of each input: inputs of small numbers do not count more.
        jacobian = model.jac_physical(x) * model.input_std
        made = cls(x, model.predict(x).detach(), jacobian)
        made.true_jacobian = made.true_jacobian * model.input_std
        return made

    def error(self) -> float:
        """Of the Jacobian, as a share of the true one's size."""
        return float((self.jacobian - self.true_jacobian).norm() / self.true_jacobian.norm())

    def panels(self) -> list[Panel]:
        """Return what is true on the horizontal axis, what was learnt on the vertical one."""
        return [
            *_beside([f"{name}, predicted" for name in OUTPUTS], self.true.unbind(1), self.predicted.unbind(1)),
            *_beside(
                [f"change of {name} with each input" for name in OUTPUTS],
                [part.flatten() for part in self.true_jacobian.unbind(1)],
                [part.flatten() for part in self.jacobian.unbind(1)],
            ),
        ]


def _beside(titles: Sequence[str], true: Sequence[Tensor], learnt: Sequence[Tensor]) -> list[Panel]:
    panels = []
    for title, x, y, color in zip(titles, true, learnt, COLORS, strict=False):
        both = torch.cat([x.double(), y.double()])
        ends = [float(both.min()), float(both.max())]
        panels.append(
            Panel(
                title=title, x="true", alone=True, nearest=True, lines=[
                    Line(name="equal", x=ends, y=ends, color="#9aa5ad", width=1, hover=False),
                    Line(name="", x=x.tolist(), y=y.tolist(), color=color, joined=False, mark="circle", opacity=0.35),
                ],
            )
        )  # fmt: skip
    return panels


def _figures(rows: Rows, found: Found) -> str:
    best = min((row for row in rows if "val_loss" in row), key=lambda row: row["val_loss"])
    return html_table(
        ["figure", "value", "goal"],
        [
            ("root mean square error of the area fraction", best["rmse_aice"], f"at most {GOALS['rmse_aice']}"),
            ("root mean square error of the volume per area (m)", best["rmse_vice"], f"at most {GOALS['rmse_vice']}"),
            ("loss in scaled numbers", best["val_loss"], ""),
            ("distance of the Jacobian from the true one, of that one's size", found.error(), ""),
            ("condition number of the Jacobian, mean", best["jacobian/condition"], ""),
        ],
    )


def _line(rows: Rows, key: str, name: str, color: str, mark: bool = True) -> Line:
    chosen = [row for row in rows if key in row]
    x, y = [row["step"] + 1 for row in chosen], [_first(row[key]) for row in chosen]
    return Line(name=name, group=name, x=x, y=y, color=color, mark="circle" if mark else "")


def _first(value: Any) -> Any:
    """Return a learning rate is one of each parameter group."""
    return value[0] if isinstance(value, list) else value


def _training_panels(rows: Rows) -> list[Panel]:
    losses = [_line(rows, "loss", "loss", COLORS[0], False), _line(rows, "val_loss", "validation loss", COLORS[1])]
    errors = [
        _line(rows, f"rmse_{name}", f"RMSE of {name}", color) for name, color in zip(OUTPUTS, COLORS[2:], strict=False)
    ]
    return [
        Panel(title="mean square error, scaled", lines=losses, ylog=True),
        Panel(title="validation, in the units of the files", lines=errors, ylog=True),
    ]


def _jacobian_panels(rows: Rows) -> list[Panel]:
    sizes = [
        _line(rows, f"jacobian/{key}", name, color)
        for (key, name), color in zip(
            {"frobenius": "Frobenius norm", "spectral": "largest singular value", "max": "largest entry", "std": "standard deviation"}.items(),
            COLORS, strict=False,
        )
    ]  # fmt: skip
    last = next(row for row in reversed(rows) if "val_loss" in row)
    strongest = sorted(INPUTS, key=lambda name: -last[f"jacobian/sensitivity/{name}"])[:6]
    inputs = [
        _line(rows, f"jacobian/sensitivity/{name}", f"to {name}", color)
        for name, color in zip(strongest, COLORS, strict=False)
    ]
    return [
        Panel(title="size", lines=sizes, zero=True),
        Panel(title="sensitivity to the six strongest inputs", lines=inputs, zero=True),
    ]


def _still_panels(rows: Rows) -> list[Panel]:
    losses = [_line(rows, "loss", "loss", COLORS[0], False), _line(rows, "val_loss", "validation loss", COLORS[1])]
    return [
        Panel(title="Huber loss, scaled", lines=losses, ylog=True),
        Panel(title="learning rate", lines=[_line(rows, "lr", "learning rate", COLORS[3], False)]),
    ]


def _ended(run: Path) -> str:
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    why = result.get("reason") or "it came to its last epoch"
    return f"The Huber loss, and a rate that is halved on plateaus. It ended after {result['steps']} steps: {why}."


def _ranks(proof: Mapping[str, Any], folder: Path) -> str:
    rows = []
    for world, found in proof["worlds"].items():
        memory = folder / "proof" / "verify" / f"world-{world}" / "files" / "memory.json"
        held = [rank["patterns"] for rank in json.loads(memory.read_text(encoding="utf-8"))]
        rows.append((int(world), found["state_hash"][:16], max(held)))
    same = len({row[1] for row in rows}) == 1
    text = "All are one run, to the bit." if same else "These are different runs."
    table = html_table(["ranks", "final state", "training patterns on a rank, at most"], rows)
    return f"<p>{text} A rank reads and keeps the patterns of its lanes.</p>{table}"


def _cpp(compared: Mapping[str, Any] | None) -> str:
    if compared is None:
        return "<p>Not compiled here.</p>"
    printed = "<br>".join(f"<code>{html.escape(line[:160])}</code>" for line in compared["printed"])
    table = html_table(["method", "difference, of the largest number"], list(compared["differences"].items()))
    return f"<p>C++ and Python on {compared['patterns']} patterns. What the program prints of the file:</p><p>{printed}</p>{table}"


def _times(seconds: Mapping[str, float]) -> str:
    rows = {**seconds, "all": sum(seconds.values())}
    return html_table(["command", "seconds"], [[what, round(spent)] for what, spent in rows.items()])
