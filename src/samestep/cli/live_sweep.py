"""The trials of a sweep that runs, as one table that a terminal keeps up to date."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from samestep.cli.app import plain

if TYPE_CHECKING:
    from samestep.sweep.loading import LoadedSweep
    from samestep.sweep.storage import TrialRecord
    from samestep.sweep.trial import LiveTrial

_SECONDS = 0.25
"""Between two drawings of the same trials."""
_BAR = 24
_LINES_AROUND = 9
"""Lines of a terminal that are not rows of the table."""
_COLORS = {"complete": "green", "pruned": "bright_black", "failed": "red", "running": "cyan"}


class LiveSweepTable:
    """While entered, the table is at the end of the terminal, and lines scroll above it."""

    def __init__(self, loaded: LoadedSweep, console: Console) -> None:
        self._sweep, self._console = loaded.sweep, console
        # Drawn by this thread: a sweep starts processes, and a thread of rich's may hold a lock meanwhile.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn = 0.0
        self._last: Any = None

    def __enter__(self) -> LiveSweepTable:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def line(self, text: str) -> None:
        """A line above the table."""
        self._console.print(plain(text))

    def show(self, over: Mapping[int, TrialRecord], live: Mapping[int, LiveTrial], count: int) -> None:
        """Draw the trials as they are now, if they have changed or a moment has passed."""
        now = time.monotonic()
        state = (len(over), [(t.number, t.fold, sum(map(len, t.curves))) for t in live.values()])
        if state == self._last and now - self._drawn < _SECONDS:
            return
        self._last, self._drawn = state, now
        self._live.update(self.table(over, live, count, now), refresh=True)

    def table(self, over: Mapping[int, TrialRecord], live: Mapping[int, LiveTrial], count: int, now: float) -> Group:
        """Return what is drawn: as many of the last trials as fit, and all that run."""
        from samestep.sweep.storage import best_words

        sweep = self._sweep
        folds = ["folds"] if sweep.folds is not None else []
        names = ("trial", "state", *sweep.metrics, *sweep.domains, *folds, "")
        table = Table(*(Column(plain(name)) for name in names))
        lines = max(3, self._console.height - _LINES_AROUND - len(live))
        for number in sorted(over)[-lines:]:
            self._add(table, over[number])
        for number in sorted(live):
            self._add_live(table, live[number], now)
        best = best_words(sweep, list(over.values()))
        done = f"{bar(len(over), count)} {len(over)} of {count} trials"
        return Group(table, plain(f"{done}; {best}" if best else done))

    def _add(self, table: Table, trial: TrialRecord) -> None:
        record = trial.as_json()
        reason = str(record["reason"] or "").partition("\n")[0]
        self._row(table, trial.number, trial.state, trial.results, trial.values, len(record["folds"]), reason)

    def _add_live(self, table: Table, trial: LiveTrial, now: float) -> None:
        curve = trial.curves[trial.fold] if trial.fold < len(trial.curves) else []
        found = [curve[-1][1]] if curve else []  # it asks by the first objective only
        words = f"{now - trial.began:.0f} s"
        if curve:
            words += f", {len(curve)} evaluation{'s' if len(curve) > 1 else ''}, step {curve[-1][0]}"
        self._row(table, trial.number, "running", found, trial.values, trial.fold, words)

    def _row(
        self,
        table: Table,
        number: int,
        state: str,
        found: Sequence[float],
        values: Mapping[str, Any],
        folds: int,
        words: str,
    ) -> None:
        from samestep.sweep.storage import trial_cells

        rule = self._sweep.folds
        done = [] if rule is None else [f"{bar(folds, rule.k, rule.k)} {folds}/{rule.k}"]
        # As Text: what a person or a task has written is no markup.
        cells = [plain(cell) for cell in (*trial_cells(self._sweep, found, values), *done, words)]
        table.add_row(str(number), Text(state, style=_COLORS[state]), *cells)


def bar(done: int, total: int, width: int = _BAR) -> str:
    """Return a bar of so many characters."""
    width = min(width, _BAR)
    full = width * min(done, total) // max(total, 1)
    return "█" * full + "░" * (width - full)
