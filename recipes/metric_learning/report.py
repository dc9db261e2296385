"""The page of results: figures and goals, curves, the embeddings, and what was classified wrongly."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.config import load_config
from samestep.distributed.context import create_run_context
from samestep.distributed.hardware import detect_hardware
from samestep.models.embeddings.embedded import EmbeddingRequest, embed_run
from samestep.models.embeddings.report import figure, picture_of
from samestep.report.chart import COLORS, Line, Panel, chart
from samestep.report.page import write_page
from samestep.report.table import html_table

GOALS = {"precision_at_1": 0.85, "accuracy": 0.88}
"""What a training of the same kind by hand reached on the digits: 0.855 and 0.88."""
MOST = 10
"""Mistakes that are listed."""
Rows = list[dict[str, Any]]


def write_results(
    first: Path, second: Path, range_test: Mapping[str, Any], folder: Path, seconds: Mapping[str, float], path: Path
) -> None:
    """Write the page.

    Args:
        first: the first stage's run.
        second: the second stage's.
        range_test: what `tune lr --json` printed.
        folder: where data and predictions are.
        seconds: how long each command took.
        path: the page.
    """
    one, two = rows_of(first), rows_of(second)
    body = f"""<h1>Metric learning in two stages</h1>
<p>Stage 1 trains an encoder by a contrast of all images of the global batch, two views of each; the best three
checkpoints are averaged. Stage 2 trains a classifier on that encoder, which stays as it is.</p>
{_figures(one, two, first)}
<h2>Stage 1: contrast</h2>
{chart(_first_panels(one), wide=True)}
<h2>Embeddings of the validation images</h2>
{_embeddings(first)}
<h2>Stage 2: classifier</h2>
{chart([_range_panel(range_test)])}
{chart(_second_panels(two), wide=True)}
{_mistakes(folder / "labels.csv")}
<h2>Time</h2>
{_times(seconds)}"""
    write_page(path, "Metric learning in two stages", body, {"folder": str(folder)})


def rows_of(run: Path) -> Rows:
    """Return what a run has logged."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def best(rows: Rows, name: str) -> float:
    """Return the highest value of a metric."""
    return max(row[name] for row in rows if name in row)


def _figures(one: Rows, two: Rows, first: Path) -> str:
    average = _averaged(first)
    precision, accuracy = (f"at least {GOALS[name]}" for name in ("precision_at_1", "accuracy"))
    table = [
        ("1", "precision@1 of the head's embeddings, EMA weights", best(one, "ema_precision_at_1"), precision),
        ("1", "precision@1 of the encoder's, EMA weights", best(one, "ema_encoder/precision_at_1"), ""),
        ("1", "MAP@R of the head's, EMA weights", best(one, "ema_mean_average_precision_at_r"), ""),
        ("1", "precision@1 of the mean of the best checkpoints", average, precision),
        ("2", "accuracy", best(two, "accuracy"), accuracy),
        ("2", "macro F1", best(two, "macro_f1"), ""),
    ]
    lines = "".join(
        f'<tr><td>{stage}</td><td>{name}</td><td class="number">{value:.4f}</td><td>{goal}</td></tr>'
        for stage, name, value, goal in table
    )
    head = '<th>stage</th><th>figure</th><th class="number">value</th><th>goal on the digits</th>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def _averaged(first: Path) -> float:
    from safetensors import safe_open

    with safe_open(first / "average.safetensors", "pt") as file:
        return float(json.loads(file.metadata()["metrics"])["precision_at_1"])


def _line(rows: Rows, key: str, name: str, color: str, mark: bool = True) -> Line:
    chosen = [row for row in rows if key in row]
    return Line(
        name=name, group=name, x=[row["step"] + 1 for row in chosen], y=[row[key] for row in chosen],
        color=color, mark="circle" if mark else "",
    )  # fmt: skip


def _first_panels(rows: Rows) -> list[Panel]:
    return [
        Panel(title="SupCon over the global batch", lines=[_line(rows, "loss", "loss", COLORS[0], False)]),
        Panel(
            title="precision@1",
            lines=[
                _line(rows, "ema_precision_at_1", "EMA, head", COLORS[1]),
                _line(rows, "precision_at_1", "as trained, head", COLORS[2]),
                _line(rows, "ema_encoder/precision_at_1", "EMA, encoder", COLORS[3]),
            ],
        ),
    ]


def _range_panel(found: Mapping[str, Any]) -> Panel:
    losses = Line(name="loss", group="loss", x=found["rates"], y=found["losses"], color="#9db4c8", width=1)
    smooth = Line(name="smoothed", group="smoothed", x=found["rates"], y=found["smoothed"], color=COLORS[0])
    marks = [
        Line(
            name=f"{rule} {rate:.3g}", group=f"{rule} {rate:.3g}", x=[rate],
            y=[_at(found, rate)], color=color, joined=False, mark="circle",
        )
        for (rule, rate), color in zip(found["suggestions"].items(), COLORS[1:], strict=False)
    ]  # fmt: skip
    return Panel(
        title="range test of the learning rate", lines=[losses, smooth, *marks], x="learning rate",
        xlog=True, height=260, yrange=(min(found["losses"]), 1.05 * max(found["smoothed"])),
    )  # fmt: skip


def _at(found: Mapping[str, Any], rate: float) -> float:
    """Return the smoothed loss at the rate that was tried nearest to this one."""
    tried: Sequence[float] = found["rates"]
    nearest = min(range(len(tried)), key=lambda place: abs(tried[place] / rate - 1))
    return float(found["smoothed"][nearest])


def _second_panels(rows: Rows) -> list[Panel]:
    losses = [_line(rows, "loss", "loss", COLORS[0], False), _line(rows, "val_loss", "validation loss", COLORS[1])]
    scores = [_line(rows, "accuracy", "accuracy", COLORS[2]), _line(rows, "macro_f1", "macro F1", COLORS[3])]
    return [Panel(title="cross entropy", lines=losses), Panel(title="validation", lines=scores)]


def _embeddings(first: Path) -> str:
    config = load_config(first / "config.json")
    with create_run_context(config, detect_hardware()) as context:
        found = embed_run(EmbeddingRequest(first, weights="average"), context)
    assert found is not None, "one process is rank 0"
    return figure(found, picture_of(found, ("tsne", "pca")))


def _mistakes(labels: Path) -> str:
    """Return the predictions that are not what the file's folder is named."""
    with labels.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    wrong = [row for row in rows if Path(row["file"]).parent.name != row["label"]]
    shown = sorted(wrong, key=lambda row: -float(row["probability"]))[:MOST]
    lines = [(Path(r["file"]).parent.name, r["label"], float(r["probability"]), Path(r["file"]).name) for r in shown]
    table = html_table(("class", "predicted", "probability", "file"), lines, digits=".3f") if wrong else ""
    more = f" The {MOST} most confident of them:" if len(wrong) > MOST else ""
    said = f"{len(wrong)} of {len(rows)} validation images are classified wrongly.{more}"
    return f"<p>{said}</p>{table}"


def _times(seconds: Mapping[str, float]) -> str:
    rows = {**seconds, "all": sum(seconds.values())}
    return html_table(["command", "seconds"], [[what, round(spent)] for what, spent in rows.items()])
