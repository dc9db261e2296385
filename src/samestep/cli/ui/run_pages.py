"""The page of one run: curves, ranks, checkpoints, config, log; and the page that draws several runs over each other."""

from __future__ import annotations

import html
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.checkpoint.listing import FoundCheckpoint, list_checkpoints
from samestep.cli.show import checkpoint_marks, checkpoint_row, text_of
from samestep.cli.ui.overview import status_cell
from samestep.cli.ui.run_state import RunState, read_state, starts_of
from samestep.cli.ui.view import Link, View, ago
from samestep.errors import RunDirError, TextError
from samestep.parsing.files import open_regular
from samestep.parsing.json_text import read_object
from samestep.parsing.limits import visible
from samestep.report.chart import Panel
from samestep.report.curves.history import History, HistoryReader, labels
from samestep.report.curves.page import differences_table, metrics_table
from samestep.report.curves.panels import MOST_PANELS, choose, known_metrics, panels_of
from samestep.report.lanes_drawing import COLORS
from samestep.report.run_facts import flat_config
from samestep.report.table import Cell, code, html_table, marked
from samestep.run.run_dir import RANKS
from samestep.words import counted

_LOG_BYTES = 12_000
_LOG_LINES = 60


class RunView(View):
    """One run."""

    where = "runs"
    above_chart = 2

    def __init__(self, run: Path) -> None:
        self._run = run
        self.title = str(run)
        self._reader = HistoryReader(run, run.name)

    def parts(self, link: Link) -> dict[str, str]:
        del link
        state = read_state(self._run)
        ranks = read_object(self._run / RANKS)
        drawn = draw_ranks(ranks, is_over=state.status != "running", now=time.time())
        checkpoints = list_checkpoints(self._run / "checkpoints", checksums=False)
        return {
            "state": _state_table(state),
            "ranks": f"<h2>Ranks</h2>{drawn}" if drawn else "",
            "checkpoints": _checkpoints(checkpoints),
            "log": _log_tail(self._run),
            "config": _config_table(self._run),
        }

    def panels(self) -> Sequence[Panel] | None:
        try:
            if not self._reader.read():
                return None
        except RunDirError:
            return None  # it has measured nothing yet
        history = self._reader.history()
        if not known_metrics([history]):
            return None
        panels = panels_of([history], choose([history], []))[:MOST_PANELS]
        return [_with_resumes(panel, starts_of(self._run)[1:]) for panel in panels]


def _with_resumes(panel: Panel, starts: Sequence[Any]) -> Panel:
    """Mark where the run was resumed, and on how many ranks."""
    marks = [{"x": one["step"], "text": f"resumed on {counted(one['world'], 'rank')}"} for one in starts]
    first, *others = panel.lines
    return replace(panel, lines=[replace(first, flags=[*first.flags, *marks]), *others])


def _state_table(state: RunState) -> str:
    total = "" if state.total is None else f" of {state.total:,}"
    rows: list[tuple[str, Any]] = [
        ("status", status_cell(state)),
        ("step", f"{state.step:,}{total}"),
        ("ranks", _worlds(state)),
        ("loss", text_of(state.loss) or "not known yet"),
    ]
    rows += [("best", state.best)] if state.best else []
    rows += [("last sign", f"{ago(state.age)} ago")]
    rows += [("why", marked(state.reason, "broken"))] if state.reason else []
    if state.is_silent or state.status not in ("finished", "stopped_early", "running"):
        rows.append(("resume it", code(shlex.join(["samestep", "resume", str(state.path)]))))
    if state.status == "running":
        rows.append(("stop it", code(shlex.join(["samestep", "stop", str(state.path)]))))
    return html_table((), rows, kind="facts")


def _worlds(state: RunState) -> str:
    if len(state.starts) < 2:
        return state.worlds
    return ", then ".join(f"{start['world']} from step {start['step']}" for start in state.starts)


def _checkpoints(found: Sequence[FoundCheckpoint]) -> str:
    if not found:
        return "<h2>Checkpoints</h2><p>None yet.</p>"
    marks = checkpoint_marks(found)
    columns = ["step", "epoch", "written", "ranks", "MB", "metrics", "", "state"]
    rows = []
    for item in found:
        *cells, state = checkpoint_row(item, marks, verified=False)
        rows.append([*cells, marked(state, "broken" if item.wrong else "kept")])
    return f"<h2>Checkpoints</h2>{html_table(columns, rows, kind='rows')}"


def _config_table(run: Path) -> str:
    """Return every value of the config, and whether it was set by the command line or is in the config's file."""
    values = flat_config(run)
    if not values:
        return ""
    command = read_object(run / "origin.json").get("command")
    known = command if isinstance(command, dict) else {}
    given = known.get("overrides")
    overrides = [text for text in given if isinstance(text, str)] if isinstance(given, list) else []
    set_here = {text.partition("=")[0]: text for text in overrides}
    typed = " ".join(shlex.quote(str(word)) for word in (known.get("verb"), known.get("file"), *overrides) if word)
    head = f"<p>Started by <code>samestep {html.escape(typed)}</code></p>" if typed else ""
    rows = [(key, value, f"command line: {set_here[key]}" if key in set_here else "") for key, value in values.items()]
    table = html_table(["key", "value", "set by"], rows, kind="facts")
    return f"<h2>Config</h2>{head}<details><summary>all {len(rows)} values</summary>{table}</details>"


def _log_tail(run: Path) -> str:
    path = run / "logs" / "rank-0.log"
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOG_BYTES))
            text = file.read(_LOG_BYTES).decode("utf-8", "replace")
    except (OSError, TextError):
        return ""
    lines = text.splitlines()[-_LOG_LINES:]
    return f"<h2>Log of rank 0</h2><pre class=log>{html.escape(visible(chr(10).join(lines)))}</pre>"


class CompareView(View):
    """Several runs."""

    where = "runs"

    def __init__(self, runs: Sequence[Path]) -> None:
        names = labels(runs)
        self.title = ", ".join(names)
        self._readers = [HistoryReader(run, name) for run, name in zip(runs, names, strict=True)]
        self._histories: list[History] = []
        self._read()
        self._is_drawn = False

    def _read(self) -> bool:
        is_new = not self._histories
        for reader in self._readers:
            try:
                is_new |= reader.read()
            except RunDirError:
                continue  # it has measured nothing yet
        if is_new:
            self._histories = [reader.history() for reader in self._readers]
        return is_new

    def parts(self, link: Link) -> dict[str, str]:
        del link
        metrics = choose(self._histories, []) if known_metrics(self._histories) else []
        numbers = f"<h2>Numbers</h2>{metrics_table(self._histories, metrics)}"
        return {"configs": differences_table(self._histories), "numbers": numbers}

    def panels(self) -> Sequence[Panel] | None:
        is_new = self._read() or not self._is_drawn
        if not is_new or not known_metrics(self._histories):
            return None
        self._is_drawn = True
        return panels_of(self._histories, choose(self._histories, []))[:MOST_PANELS]


_LATE = 15.0
"""Seconds without a heartbeat after which a rank is late: the file comes every five."""
_LONG = 2.0
"""Seconds in one phase that are worth a word."""
_MOST_RANKS = 64
_MOST_LANES = 64


def draw_ranks(document: Mapping[str, Any], is_over: bool, now: float) -> str:
    """Return a table with a row per rank; empty if the file says nothing.

    Args:
        is_over: Whether the run has ended: then the last heartbeats say nothing.
    """
    ranks = [rank for rank in _list(document.get("ranks")) if isinstance(rank, dict)]
    if not ranks:
        return ""
    rows = [_row(rank, now)[: 3 if is_over else 6] for rank in ranks[:_MOST_RANKS]]
    more = f"<p>and {len(ranks) - _MOST_RANKS} more</p>" if len(ranks) > _MOST_RANKS else ""
    header = ["rank", "lanes", "host", "step", "phase", "heartbeat"]
    return html_table(header[: 3 if is_over else 6], rows, kind="rows") + more


def _row(rank: Mapping[str, Any], now: float) -> tuple[Any, ...]:
    lanes = [lane for lane in _list(rank.get("lanes")) if isinstance(lane, int)]
    age = max(0.0, now - _number(rank.get("beat"), now))
    beat = marked(f"{ago(age)} ago", "broken" if age > _LATE else "kept")
    seconds = _number(rank.get("seconds"), 0.0)
    phase = str(rank.get("phase", "")) + (f" for {ago(seconds)}" if seconds > _LONG else "")
    return rank.get("rank", ""), Cell(_lanes(lanes)), str(rank.get("host", "")), rank.get("step", 0), phase, beat


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, (int, float)) else default


def _lanes(lanes: list[int]) -> str:
    boxes = "".join(
        f'<i style="background:{COLORS[lane % len(COLORS)]}" title="lane {lane}">{lane if len(lanes) <= 16 else ""}</i>'
        for lane in lanes[:_MOST_LANES]
    )
    more = html.escape(f" and {len(lanes) - _MOST_LANES} more") if len(lanes) > _MOST_LANES else ""
    return f'<span class="lane-boxes">{boxes}</span>{more}'
