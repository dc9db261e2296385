"""The page of one sweep: its trials with their folds, the best marked."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.cli.show import text_of
from samestep.cli.ui.run_state import read_state, sparkline_svg
from samestep.cli.ui.view import Link, View, anchor
from samestep.errors import MissingExtraError, SamestepError
from samestep.report.table import Cell, html_table, marked
from samestep.sweep.study_folder import trial_folder

if TYPE_CHECKING:
    from samestep.sweep.loading import LoadedSweep
    from samestep.sweep.storage import TrialRecord

_STATES = {"complete": "kept", "failed": "broken"}


class SweepView(View):
    """One sweep."""

    where = "sweeps"

    def __init__(self, folder: Path, runs: Sequence[Path]) -> None:
        self._folder = folder
        self._runs = [run for run in runs if folder in run.parents]
        self.title = str(folder)

    def parts(self, link: Link) -> dict[str, str]:
        try:
            from samestep.sweep.reading import reload_sweep, trials_of

            loaded = reload_sweep(self._folder)
            trials = trials_of(loaded)
        except (SamestepError, MissingExtraError) as error:
            return {"trials": f"<p>{html.escape(str(error))}</p>"}
        return {"trials": self._table(loaded, trials, link)}

    def _table(self, loaded: LoadedSweep, trials: Sequence[TrialRecord], link: Link) -> str:
        from samestep.sweep.pareto import best_words
        from samestep.sweep.storage import best_of

        sweep = loaded.sweep
        best = best_of(sweep, list(trials))
        folds = ["folds"] if sweep.folds is not None else []
        columns = ["trial", "state", *sweep.metrics, *sweep.domains, *folds, "runs"]
        rows = []
        for trial in trials:
            found = [text_of(value) or "" for value in trial.objectives]
            found += [""] * (len(sweep.metrics) - len(found))
            drawn = [text_of(trial.values.get(key)) or "" for key in sweep.domains]
            done = [] if sweep.folds is None else [f"{len(trial.as_json()['folds'])} of {sweep.folds.k}"]
            is_best = best is not None and trial.number == best.number
            number = Cell(f"<b>{trial.number} ★</b>" if is_best else str(trial.number))
            state = marked(trial.state, _STATES.get(trial.state, ""))
            rows.append([number, state, *found, *drawn, *done, self._curves(trial.number, link)])
        words = best_words(sweep, list(trials))
        head = f"<p>{html.escape(words)}</p>" if words else ""
        return head + html_table(columns, rows, kind="rows")

    def _curves(self, number: int, link: Link) -> Cell:
        """Return a small curve for each run of a trial: one, or one per fold."""
        folder = trial_folder(self._folder, number)
        cells: list[Any] = []
        for run in self._runs:
            if folder == run or folder in run.parents:
                curve = sparkline_svg(read_state(run).losses)
                cells.append(anchor(link("run", run), run.name).html + curve)
        return Cell(" ".join(cells))
