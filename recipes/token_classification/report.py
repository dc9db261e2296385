"""The page of results: figures, curves, each type, the search, int8, and documents with what was found in them."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from documents import Document, Span, read_documents

from samestep.report.chart import COLORS, Line, Panel, chart
from samestep.report.page import write_page
from samestep.report.table import html_table

_table = partial(html_table, digits=".4f")

GOAL = 0.99
"""Of the macro F1 after six epochs on the documents that made_up.py writes."""
SHOWN = 6
"""Documents on the page: the first ones with a mistake, then others."""


def write_results(
    folder: Path, sweep: Mapping[str, Any], compared: Mapping[str, Any], seconds: Mapping[str, float], path: Path
) -> None:
    """Write the page.

    Args:
        folder: where the data, the runs and the predictions are.
        sweep: what `sweep run --json` printed.
        compared: what `quantize.py --json` printed.
        seconds: how long each command took.
        path: the page.
    """
    run = folder / "runs" / "entities"
    best = json.loads((run / "result.json").read_text(encoding="utf-8"))["best"]["metrics"]
    body = f"""<h1>Entities in documents</h1>
<p>A small transformer with new weights labels each token. All figures are of the whole validation set.</p>
{_figures(best)}
<h2>Training</h2>
{chart(_panels(run), wide=True)}
<h2>Each type of entity</h2>
{_per_entity(best)}
<h2>Search</h2>
{_trials(sweep)}
<h2>ONNX and int8</h2>
{_quantized(compared)}
<h2>Documents</h2>
{_documents(folder)}
<h2>Time</h2>
{_times(seconds)}"""
    write_page(path, "Entities in documents", body, {"folder": str(folder)})


def _figures(best: Mapping[str, float]) -> str:
    return _table(
        ["figure", "value", "goal"],
        [
            ("macro F1 of the tokens' labels", best["macro_f1"], f"at least {GOAL}"),
            ("F1 of whole entities", best["entity_f1"], ""),
            ("loss", best["val_loss"], ""),
        ],
    )


def _panels(run: Path) -> list[Panel]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]

    def line(key: str, name: str, color: str, mark: str = "circle") -> Line:
        chosen = [row for row in rows if key in row]
        x, y = [row["step"] + 1 for row in chosen], [row[key] for row in chosen]
        return Line(name=name, group=name, x=x, y=y, color=color, mark=mark)

    losses = [line("loss", "loss", COLORS[0], ""), line("val_loss", "validation loss", COLORS[1])]
    scores = [line("macro_f1", "macro F1", COLORS[2]), line("entity_f1", "F1 of entities", COLORS[3])]
    return [Panel(title="cross entropy", lines=losses), Panel(title="validation", lines=scores)]


def _per_entity(best: Mapping[str, float]) -> str:
    kinds = sorted({name.split("/")[1] for name in best if name.startswith("per_entity/")})
    columns = ("precision", "recall", "f1")
    return _table(
        ["type", *columns, "support"],
        [
            [
                kind,
                *(best[f"per_entity/{kind}/{column}"] for column in columns),
                int(best[f"per_entity/{kind}/support"]),
            ]
            for kind in kinds
        ],
    )


def _trials(sweep: Mapping[str, Any]) -> str:
    trials = sweep["trials"]
    drawn = {key for trial in trials for key in trial["params"]}
    # What is the same in all trials was not searched for.
    keys = [k for k in sorted(drawn) if len({str(t["params"].get(k)) for t in trials}) > 1]
    return _table(
        ["trial", "state", *keys, "macro F1", "folds"],
        [
            [
                trial["number"],
                trial["state"],
                *(trial["params"][key] for key in keys),
                "" if trial["value"] is None else trial["value"],
                " ".join(f"{value:.4f}" for value in trial["folds"] or ()),
            ]
            for trial in trials
        ],
    )


def _quantized(compared: Mapping[str, Any]) -> str:
    table = _table(
        ["file", "bytes", "macro F1", "F1 of entities"],
        [[Path(row["file"]).name, row["bytes"], row["macro_f1"], row["entity_f1"]] for row in compared["files"]],
    )
    share = f"{compared['agreement']:.2%} of {compared['tokens']:,} tokens"
    return f"<p>{share} get the same label from both.</p>{table}"


def _documents(folder: Path) -> str:
    documents = read_documents(folder / "data" / "valid.jsonl", None)
    found: dict[int, list[Span]] = {}
    for line in (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        # A long document has several rows, one for each part.
        found.setdefault(row["document"], []).extend(Span(*span) for span in row["entities"])
    wrong = [at for at, one in enumerate(documents) if set(one.spans) != set(found[at])]
    others = [at for at in range(len(documents)) if at not in set(wrong)]
    shown = [*wrong[: SHOWN // 2], *others][:SHOWN]
    summary = f"In {len(wrong)} of {len(documents)} documents something was missed, or found where nothing is."
    return f"<p>{summary}</p>" + "".join(_marked(documents[at], found[at]) for at in shown)


def _marked(document: Document, found: Sequence[Span]) -> str:
    """Return a text with the found entities marked, and below it those that differ from the annotations."""
    pieces, at = [], 0
    for span in sorted(found):
        pieces.append(html.escape(document.text[at : span.start]))
        inside = html.escape(document.text[span.start : span.end])
        pieces.append(f"<mark>{inside}</mark><sub>{html.escape(span.type)}</sub>")
        at = span.end
    pieces.append(html.escape(document.text[at:]))
    differs = [
        f"{what} {document.text[span.start : span.end]!r} ({span.type})"
        for what, spans in (
            ("missed", set(document.spans) - set(found)),
            ("wrongly found", set(found) - set(document.spans)),
        )
        for span in sorted(spans)
    ]
    note = f"<br><em>{html.escape('; '.join(differs))}</em>" if differs else ""
    return f"<p>{''.join(pieces).strip()}{note}</p>"


def _times(seconds: Mapping[str, float]) -> str:
    rows = {**seconds, "all": sum(seconds.values())}
    return _table(["command", "seconds"], [[what, round(spent)] for what, spent in rows.items()])
