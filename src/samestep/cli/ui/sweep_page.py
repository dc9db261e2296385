"""The page of one sweep: its trials with their folds, the best marked."""

from __future__ import annotations

import html
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.cli.ui.overview import Find
from samestep.cli.ui.run_state import read_state, sparkline_svg
from samestep.cli.ui.view import Link, View, anchor
from samestep.errors import NotTrusted, SamestepError
from samestep.report.table import Cell, html_table, marked
from samestep.sweep.study_folder import trial_folder

if TYPE_CHECKING:
    from samestep.sweep.loading import LoadedSweep
    from samestep.sweep.storage import TrialRecord

_STATES = {"complete": "kept", "failed": "broken"}


class SweepView(View):
    """One sweep."""

    where = "sweeps"

    def __init__(self, folder: Path, find: Find) -> None:
        self._folder, self._find = folder, find
        self._runs: Sequence[Path] = ()
        self.title = str(folder)

    def parts(self, link: Link) -> dict[str, str]:
        try:
            from samestep.sweep.reading import reload_sweep, trials_of

            loaded = reload_sweep(self._folder)
            trials = trials_of(loaded)
        except NotTrusted as error:
            show = shlex.join(["samestep", "show", str(self._folder), "--trust"])
            return {"trials": f"<p>{html.escape(str(error))}: <code>{html.escape(show)}</code></p>"}
        except SamestepError as error:
            return {"trials": f"<p>{html.escape(str(error))}</p>"}
        self._runs = [run for run in self._find().runs if self._folder in run.parents]
        return {"trials": self._table(loaded, trials, link)}

    def _table(self, loaded: LoadedSweep, trials: Sequence[TrialRecord], link: Link) -> str:
        from samestep.sweep.storage import best_of, best_words, trial_cells

        sweep = loaded.sweep
        best = best_of(sweep, trials)
        folds = ["folds"] if sweep.folds is not None else []
        columns = ["trial", "state", *sweep.metrics, *sweep.domains, *folds, "runs"]
        rows = []
        for trial in trials:
            cells = trial_cells(sweep, trial.objectives, trial.values)
            done = [] if sweep.folds is None else [f"{len(trial.as_json()['folds'])} of {sweep.folds.k}"]
            is_best = best is not None and trial.number == best.number
            number = Cell(f"<b>{trial.number} ★</b>" if is_best else str(trial.number))
            state = marked(trial.state, _STATES.get(trial.state, ""))
            rows.append([number, state, *cells, *done, self._curves(trial.number, link)])
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
