"""The panels of a sweep with several objectives: each of them against the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from samestep.sweep.panels import COLORS, described
from samestep.sweep.pareto import front
from samestep.sweep.schema import SweepConfig
from samestep.sweep.storage import TrialRecord
from samestep.ui.chart import Line, Panel

_FRONT = "#7a3e9d"


def pareto_panels(sweep: SweepConfig, trials: Sequence[TrialRecord]) -> Iterator[Panel]:
    """A panel for each further objective; none if no trial is complete."""
    done = [trial for trial in trials if len(trial.objectives) == len(sweep.metrics)]
    best = sorted(front(sweep, done), key=lambda trial: trial.objectives)
    others = [trial for trial in done if trial not in best]
    for at, metric in enumerate(sweep.metrics[1:] if done else (), start=1):
        marks = [_marks(sweep, best, at, "Pareto front", _FRONT)]
        if others:
            marks.insert(0, _marks(sweep, others, at, "complete", COLORS["complete"]))
        if len(sweep.metrics) == 2:
            # With more, what is a front in all of them is no line in two.
            line = Line(
                name="no trial is better in both", group="Pareto front", color=_FRONT, width=1.3,
                x=[trial.objectives[0] for trial in best], y=[trial.objectives[1] for trial in best],
                hover=False,
            )  # fmt: skip
            marks.insert(0, line)
        yield Panel(
            title="Pareto front", x=sweep.objective.metric, y=metric, alone=True, nearest=True,
            lines=marks, height=300,
        )  # fmt: skip


def _marks(
    sweep: SweepConfig, trials: Sequence[TrialRecord], at: int, group: str, color: str
) -> Line:
    return Line(
        name=group, group=group, color=color, joined=False, mark="circle",
        x=[trial.objectives[0] for trial in trials], y=[trial.objectives[at] for trial in trials],
        text=[
            f"trial {trial.number}: {sweep.metrics[at]} {trial.objectives[at]:.6g}\n{described(sweep, trial)}"
            for trial in trials
        ],
    )  # fmt: skip
