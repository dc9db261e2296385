"""The page that draws several runs over each other, with where their configs differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from samestep.cli.ui.view import Link, View
from samestep.errors import RunDirError
from samestep.report.chart import Panel
from samestep.report.curves.history import History, HistoryReader, labels
from samestep.report.curves.page import differences_table, metrics_table
from samestep.report.curves.panels import MOST_PANELS, choose, known_metrics, panels_of


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
