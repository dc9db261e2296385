"""The pages that list: runs, sweeps, and verifications."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.cli.show import text_of
from samestep.cli.ui.folders import Folders
from samestep.cli.ui.run_state import RunState, read_state, sparkline_svg
from samestep.cli.ui.view import Link, View, ago, anchor
from samestep.parsing.json_text import read_object
from samestep.report.table import Cell, code, html_table, marked
from samestep.sweep.study_folder import SWEEP, coordinator_of

_KINDS = {"finished": "kept", "stopped_early": "kept", "failed": "broken", "killed": "broken", "unreadable": "broken"}
"""The color of a status."""

_FAR_AWAY = 1e11
"""Seconds since 1970 that are no date."""

Find = Callable[[], Folders]


class RunsView(View):
    """All runs, the newest first."""

    title, where = "Runs", "runs"

    def __init__(self, find: Find) -> None:
        self._find = find
        self._known: dict[Path, tuple[tuple[int, ...], RunState]] = {}

    def parts(self, link: Link) -> dict[str, str]:
        runs = self._find().single_runs
        states = sorted(map(self._state, runs), key=lambda state: -state.changed)
        self._known = {run: self._known[run] for run in runs if run in self._known}
        if not states:
            return {"runs": "<p>There are no runs here yet.</p>"}
        columns = ["", "run", "status", "step", "ranks", "loss", "", "best", "last sign"]
        rows = [_run_row(state, link) for state in states]
        return {"runs": html_table(columns, rows, numbers=("step", "loss"), kind="rows sortable")}

    def _state(self, run: Path) -> RunState:
        """Return a run's state, read again only if one of its files has changed or its process may have ended."""
        stamp = tuple(_stamp(run / name) for name in ("result.json", "metrics.jsonl", "ranks.json"))
        known = self._known.get(run)
        if known is None or known[0] != stamp or known[1].status == "running":
            known = self._known[run] = (stamp, read_state(run))
        return known[1]


def _stamp(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _run_row(state: RunState, link: Link) -> Sequence[Any]:
    address = link("run", state.path)
    name = html.escape(str(state.path), quote=True)
    choice = f'<input type="checkbox" class="choose" value="{name}" aria-label="compare {name}">'
    choice = choice if address.startswith("run?") else ""  # on a page of the server
    total = "" if state.total is None else f" / {state.total:,}"
    return (
        Cell(choice), anchor(address, str(state.path)), status_cell(state), f"{state.step:,}{total}",
        state.worlds, text_of(state.loss) or "", Cell(sparkline_svg(state.losses)), state.best,
        Cell(f'<span data-value="{state.age:.0f}">{ago(state.age)}</span>'),
    )  # fmt: skip


def status_cell(state: RunState) -> Cell:
    """Return a run's status in its color; one that trains and writes nothing is said to be silent."""
    words = f"running, silent for {ago(state.age)}" if state.is_silent else state.status.replace("_", " ")
    return marked(words, f"short {'broken' if state.is_silent else _KINDS.get(state.status, '')}".rstrip())


class SweepsView(View):
    """All sweeps."""

    title, where = "Sweeps", "sweeps"

    def __init__(self, find: Find) -> None:
        self._find = find

    def parts(self, link: Link) -> dict[str, str]:
        sweeps = self._find().sweeps
        if not sweeps:
            return {"sweeps": "<p>There are no sweeps here yet.</p>"}
        rows = [_sweep_row(sweep, link) for sweep in sweeps]
        return {"sweeps": html_table(["sweep", "state", "objective", "trials"], rows, kind="rows")}


def _sweep_row(sweep: Path, link: Link) -> Sequence[Any]:
    document, holder = read_object(sweep / SWEEP), coordinator_of(sweep)
    objective = document.get("objective")
    words = f"{objective.get('metric')}, {objective.get('mode')}" if isinstance(objective, dict) else ""
    running = holder is not None and holder.is_alive
    trials = len(list((sweep / "trials").glob("trial-*")))
    return anchor(link("sweep", sweep), str(sweep)), "running" if running else "not running", words, trials


class ProofsView(View):
    """All verifications, the newest first."""

    title, where = "Proofs", "proofs"

    def __init__(self, find: Find) -> None:
        self._find = find

    def parts(self, link: Link) -> dict[str, str]:
        del link
        documents = [(path, read_object(path)) for path in self._find().proofs]
        known = [(path, one) for path, one in documents if isinstance(one.get("worlds"), dict)]
        if not known:
            return {"proofs": "<p>Nothing was verified here yet: <code>samestep verify CONFIG</code></p>"}
        known.sort(key=lambda pair: -_time(pair[1]))
        rows = [_proof_row(path, one) for path, one in known]
        columns = ["config", "result", "ranks", "steps", "hash", "first difference", "when"]
        return {"proofs": html_table(columns, rows, kind="rows")}


def _proof_row(path: Path, proof: dict[str, Any]) -> Sequence[Any]:
    worlds = {label: one for label, one in proof["worlds"].items() if isinstance(one, dict)}
    first = next(iter(worlds.values()), {})
    wrong = [_difference(label, one) for label, one in worlds.items() if one.get("first_difference")]
    verdict = marked("kept", "kept") if proof.get("kept") else marked("broken", "broken")
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(_time(proof)))
    return (
        f"{proof.get('name', '')} ({path.parent.parent})", verdict, ", ".join(worlds), first.get("steps", ""),
        code(str(first.get("state_hash", ""))), "; ".join(wrong) or "none", when,
    )  # fmt: skip


def _time(proof: Mapping[str, Any]) -> float:
    found = proof.get("time")
    return float(found) if isinstance(found, (int, float)) and 0 <= found < _FAR_AWAY else 0.0


def _difference(label: str, world: dict[str, Any]) -> str:
    found = world["first_difference"]
    words = ", ".join(f"{key} {text_of(value)}" for key, value in found.items()) if isinstance(found, dict) else found
    return f"on {label}: {words}"
