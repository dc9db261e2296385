"""A sweep's plots as a picture and as a self-contained page."""

from __future__ import annotations

import html
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import RunDirError
from samestep.report.chart import Panel, chart
from samestep.report.page import write_page
from samestep.report.picture import write_panels
from samestep.report.table import html_table
from samestep.sweep.loading import LoadedSweep
from samestep.sweep.optuna_parts import import_optuna
from samestep.sweep.panels import sweep_panels
from samestep.sweep.reading import trials_of
from samestep.sweep.schema import SweepConfig
from samestep.sweep.selection import runs_of
from samestep.sweep.storage import TrialRecord, best_words, trial_cells
from samestep.words import counted

FEWEST = 4
"""Complete trials below which an estimate says nothing."""


def importances(sweep: SweepConfig, trials: Sequence[TrialRecord]) -> tuple[dict[str, float], str | None]:
    """Return the importance of each key, the greatest first, and why there is none, if there is none."""
    done = [
        trial
        for trial in trials
        # One that another program put into the storage may be of another space.
        if trial.state == "complete" and sweep.domains.keys() <= trial.frozen.params.keys()
    ]
    if len(done) < FEWEST:
        return {}, f"importance needs {FEWEST} complete trials, and there are {len(done)}"
    if len({trial.value for trial in done}) == 1:
        return {}, "importance needs trials that differ, and all have the same value"
    optuna = import_optuna()
    study = optuna.create_study(direction=sweep.directions[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Of Optuna's estimates the one that needs no other package, and draws nothing at random.
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        study.add_trials(
            optuna.trial.create_trial(
                params=trial.frozen.params, distributions=trial.frozen.distributions, value=trial.value
            )
            for trial in done
        )
        try:
            found = optuna.importance.get_param_importances(study, evaluator=evaluator)
        except (ImportError, ValueError, RuntimeError) as error:
            return {}, f"Optuna cannot estimate the importance: {error}"
    if not all(math.isfinite(value) for value in found.values()):
        return {}, "Optuna cannot estimate the importance of trials that differ so little"
    return dict(found), None


@dataclass(frozen=True)
class SweepPlots:
    """The plots of a sweep, as it is now."""

    sweep: SweepConfig
    trials: Sequence[TrialRecord]
    panels: Sequence[Panel]
    remarks: Sequence[str]
    """What is left out, and why."""

    def write_picture(self, path: Path, force: bool = False) -> None:
        """All panels in one picture; raises a `MissingExtraError` without matplotlib."""
        write_panels(_summary(self.sweep, self.trials), self.panels, path, force)

    def write_report(self, path: Path, force: bool = False) -> None:
        """All panels and a table on one page."""
        remarks = "".join(f"<p>{html.escape(remark)}.</p>" for remark in self.remarks)
        body = f"""<h1>{html.escape(self.sweep.name)}</h1>
<p>{html.escape(_summary(self.sweep, self.trials))}</p>
{chart(self.panels, wide=True)}
{remarks}<p>Triangles: trials that failed.</p>
{_table(self.sweep, self.trials)}"""
        write_page(path, f"Sweep {self.sweep.name}", body, _facts(self.sweep), force=force)


def _seconds_per_sample(sweep: SweepConfig, trial: TrialRecord) -> float | None:
    """Return what a sample costs in training, the mean of a trial's folds; None if a run has not measured it.

    Not of a step: batches of trials may differ.
    """
    from samestep.run.time_report import read_times

    found = []
    for run in runs_of(sweep, trial):
        try:
            speed = read_times(run).get("samples_per_second", {}).get("median")
        except RunDirError:
            return None
        if not speed:
            return None
        found.append(1 / speed)
    return math.fsum(found) / len(found) if found else None


def plots_of(loaded: LoadedSweep) -> SweepPlots:
    """Return the plots of a sweep, also while it runs."""
    sweep, trials = loaded.sweep, trials_of(loaded)
    important, why = importances(sweep, trials)
    costs = {
        trial.number: cost
        for trial in trials
        if trial.state == "complete" and (cost := _seconds_per_sample(sweep, trial)) is not None
    }
    panels = sweep_panels(sweep, trials, important, costs)
    return SweepPlots(sweep, trials, panels, [] if why is None else [why])


def _summary(sweep: SweepConfig, trials: Sequence[TrialRecord]) -> str:
    counts = Counter(trial.state for trial in trials)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    best = best_words(sweep, trials)
    return f"{counted(len(trials), 'trial')}{f': {states}' if states else ''}{best and f'; {best}'}"


def _facts(sweep: SweepConfig) -> Mapping[str, str]:
    rule = sweep.objective
    facts = {
        "sweep": str(sweep.path),
        "base": str(sweep.base_path),
        "objective": ", ".join(
            f"{'max' if sign < 0 else 'min'} {metric} ({rule.value})"
            for sign, metric in zip(sweep.signs, sweep.metrics, strict=True)
        ),
        "sampler, pruner": f"{sweep.sampler}, {sweep.pruner}",
        "seed": str(sweep.seed),
    }
    return facts if sweep.folds is None else {**facts, "folds": str(sweep.folds.k)}


def _table(sweep: SweepConfig, trials: Sequence[TrialRecord]) -> str:
    header = ["trial", "state", *sweep.metrics, *sweep.domains, "folds" if sweep.folds else ""]
    rows = [
        [str(trial.number), trial.state, *trial_cells(sweep, trial.results, trial.values), trial.remark]
        for trial in trials
    ]
    return html_table(header, rows, kind="rows")
