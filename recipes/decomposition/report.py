"""The page of results: figures against goals, curves, importances, components, ranks."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compare import rows_of
from heatmap import STYLE, heatmap, side_by_side
from measures import assignment, sorted_columns
from stories import WORDS

from samestep.models.trained_model import Trained, load_trained
from samestep.report.chart import COLORS, Line, Panel, chart
from samestep.report.page import write_page
from samestep.report.table import html_table

L0, MSE = (0.15, 0.25), 2 * 6.2e-5
"""Goals of TMS 5-2: the components that a sample needs in a layer, and the error with the others masked at random."""
SHOWN = 5
"""Layers of a language model whose importances are shown."""
_WIDTHS = (7, 4, 1.5)
"""Of lines that lie on each other: all of them can be seen."""
Rows = list[dict[str, Any]]

_table = partial(html_table, digits=".3g")


def write_results(
    folder: Path,
    names: Sequence[str],
    proofs: Mapping[str, Mapping[str, Any]],
    compared: Mapping[str, Sequence[str]],
    seconds: Mapping[str, float],
    path: Path,
) -> dict[str, Any]:
    """Write the page; the figures on it.

    Args:
        folder: where the runs are.
        names: of the experiments.
        proofs: of those whose first steps were verified, what `verify --json` printed.
        compared: of each complete run on several ranks, what differs from one process.
        seconds: how long each command took.
        path: the page.
    """
    figures = {name: last_evaluation(folder / "runs" / name) for name in names}
    hashes = {
        name: {world: one["state_hash"] for world, one in proof["worlds"].items()} for name, proof in proofs.items()
    }
    same = all(len(set(found.values())) == 1 for found in hashes.values())
    same = same and not any(compared.values())
    sections = "".join(_experiment(folder, name, figures[name]) for name in names)
    body = f"""{STYLE}<h1>Models in rank-one components</h1>
<p>Each layer of a frozen model becomes a sum of rank-one components, and small networks say which of them an input needs.
Importances are from 0 (white) to 1; weights are red above 0 and blue below.</p>
{sections}
<h2>Ranks</h2>
{_ranks(hashes, compared)}
<h2>Time</h2>
{_table(["command", "seconds"], [[what, round(spent)] for what, spent in {**seconds, "all": sum(seconds.values())}.items()])}"""
    write_page(path, "Models in rank-one components", body, {"folder": str(folder)})
    return {"same": same, "compared": dict(compared), "figures": figures, "hashes": hashes}


def last_evaluation(run: Path) -> dict[str, float]:
    """Return what the last evaluation of a run measured."""
    row = next(row for row in reversed(rows_of(run)) if "val_loss" in row)
    return {name: value for name, value in row.items() if name != "epoch"}


def _experiment(folder: Path, name: str, figures: Mapping[str, float]) -> str:
    rows = rows_of(folder / "runs" / name)
    target = f"params.target={folder / 'runs' / f'{name}-target' / 'files' / 'target.pt'}"
    trained = load_trained(folder / "runs" / name, "last", overrides=[target])
    others = {size: folder / "runs" / f"{name}-{size}" for size in ("two", "four")}
    curves = {"one": rows, **{size: rows_of(run) for size, run in others.items() if run.is_dir()}}
    return f"""<h2>{html.escape(name)}</h2>
{_figures(name, figures)}
<div class="charts">{"".join(chart([one]) for one in _panels(rows, curves if len(curves) > 1 else {}))}</div>
{_maps(trained)}"""


_ERRORS = {"mse": "mean squared error", "kl": "KL divergence", "ce": "cross-entropy"}
_MASKED = {
    "stochastic": "all layers masked at random",
    "stochastic_layerwise": "one layer masked at random",
    "stochastic_subset": "some layers masked at random",
    "importance_masked_subset": "some layers masked by the importances",
}
_WITH = {
    "target": "of the frozen model",
    "importance": "with all layers masked by the importances",
    "rounded": "with all layers masked by rounded importances",
    "unmasked": "with all components",
    "random": "with random masks",
    "zero": "without components",
}


def _figures(name: str, figures: Mapping[str, float]) -> str:
    """Values, with the goals of TMS 5-2."""
    rows: list[tuple[str, float, str]] = []
    between, most, none = f"{L0[0]} to {L0[1]}", f"at most {MSE:.3g}", "0"
    error = _ERRORS["kl" if "kl/zero" in figures else "mse"]
    for key, value in figures.items():
        kind, _, of = key.partition("/")
        if kind == "l0":
            rows.append((f"L0 of {of}: components that a position needs", value, between))
        elif kind == "val_loss" and of in _MASKED:
            rows.append((f"{error} with {_MASKED[of]}", value, most))
        elif kind in _ERRORS and of not in _MASKED:
            rows.append((f"{_ERRORS[kind]} {_WITH[of]}", value, ""))
        elif kind == "identity_error":
            told = f"importances of {of} that are not one component for each feature"
            rows.append((told, value, none))
    if name != "tms_5-2":
        return _table(["figure", "value"], [row[:2] for row in rows])
    return _table(["figure", "value", "goal"], rows)


def _line(rows: Rows, key: str, name: str, at: int, mark: bool = True, width: float = 2) -> Line:
    """Values of a run over its steps; `at` chooses the colour, and beyond the last one dashes."""
    chosen = [row for row in rows if key in row]
    x, y = [row["step"] + 1 for row in chosen], [row[key] for row in chosen]
    color, dashed = COLORS[at % len(COLORS)], at >= len(COLORS)
    return Line(
        name=name, group=name, x=x, y=y, color=color, mark="circle" if mark else "", width=width, dash="dash" if dashed else ""
    )  # fmt: skip


def _panels(rows: Rows, curves: Mapping[str, Rows]) -> list[Panel]:
    names = list(dict.fromkeys(name for row in rows for name in row))

    def lines(start: str, mark: bool = True) -> list[Line]:
        chosen = [name for name in names if name.startswith(start)]
        return [_line(rows, name, name.removeprefix(start), at, mark) for at, name in enumerate(chosen)]

    error = "kl/" if any(name.startswith("kl/") for name in names) else "mse/"
    panels = [
        Panel(title="losses in training", lines=lines("loss/", False), ylog=True),
        Panel(title="L0 of each layer", lines=lines("l0/"), zero=True),
        Panel(title=f"{_ERRORS[error[:-1]]}, by masks", lines=lines(error), ylog=True),
    ]
    if curves:
        overlaid = [
            _line(one, "loss", f"on {size}", at, False, width)
            for at, ((size, one), width) in enumerate(zip(curves.items(), _WIDTHS, strict=False))
        ]
        panels.append(Panel(title="loss on one, two and four ranks", lines=overlaid, ylog=True))
    return panels


def _maps(trained: Trained) -> str:
    task: Any = trained.task
    model: Any = trained.model
    probed = task.probed(model, torch.device("cpu"))
    if not probed:
        return _text_maps(trained)
    first = [
        heatmap(f"Importances in {name}", sorted_columns(found), "features, one at a time", "components")
        for name, found in probed.items()
    ]
    second = []
    for name, found in probed.items():
        components, order = model.components_for(name), _order(found)
        v = components.v.detach()[:, order]
        if v.shape[0] > found.shape[0]:  # of a residual stream: in the directions of the features
            v = model.target.embedding @ v
        second.append(heatmap(f"V of {name}", v, "inputs", "components", signed=True))
        if components.columns <= found.shape[0]:
            second.append(heatmap(f"U of {name}", components.u.detach()[order].t(), "outputs", "components", signed=True))  # fmt: skip
    return side_by_side(first) + side_by_side(second)


def _order(importances: torch.Tensor) -> list[int]:
    """Return the components that features have, in the order of the features."""
    return assignment(importances.double().tolist())


def _text_maps(trained: Trained) -> str:
    """Return what each word of a text needs, by layer; components that nothing needs are left out."""
    task: Any = trained.task
    model: Any = trained.model
    (tokens,) = task.valid_data()[0]
    with torch.no_grad():
        lower = model.see(tokens.unsqueeze(0)).lower
    maps = []
    for name, needed in list(lower.items())[:SHOWN]:
        found = needed[0]
        used = found.sum(0).argsort(descending=True)[: max(1, int((found.sum(0) > 0).sum()))]
        maps.append(heatmap(f"Importances in {name}", found[:, used], "words", "components that are needed"))
    components = model.components_for(next(iter(lower)))
    v = components.v.detach()
    strongest = v.abs().amax(0).argsort(descending=True)[:32]
    maps.append(heatmap(f"V of {next(iter(lower))}", v[:, strongest], "words of the vocabulary", "components", signed=True))  # fmt: skip
    text = " ".join(WORDS[number] for number in tokens.tolist())
    return f"<p>The text: <i>{html.escape(text)}</i></p>{side_by_side(maps)}"


def _ranks(hashes: Mapping[str, Mapping[str, str]], compared: Mapping[str, Sequence[str]]) -> str:
    rows = [
        [f"{name}, 4 steps", ", ".join(found), "identical" if len(set(found.values())) == 1 else "different"]
        for name, found in hashes.items()
    ]
    complete = [
        [f"{name}, to its end", "against one process", "; ".join(found) or "identical"]
        for name, found in compared.items()
    ]
    return _table(["experiment", "ranks", "losses, evaluations and states"], [*rows, *complete])
