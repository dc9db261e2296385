"""The plots of a sweep: its trials as panels, for a picture or a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from samestep.report.chart import Line, Panel
from samestep.sweep.schema import SweepConfig
from samestep.sweep.space import Domain
from samestep.sweep.storage import CURVES, FOLDS, TrialRecord, best_of, front, unbeaten

_COLORS = {
    "complete": "#1f5f99", "pruned": "#9aa5af", "running": "#12703c", "failed": "#b3261e",
    "best": "#c2571a", "Pareto front": "#7a3e9d",
}  # fmt: skip
_MOST_LABELS = 8
_LONGEST_LABEL = 18

_panel = partial(Panel, alone=True, nearest=True, height=300)
Places = Mapping[int, tuple[float, float | None]]
"""Where a trial is in a panel, by its number."""


def sweep_panels(
    sweep: SweepConfig, trials: Sequence[TrialRecord], important: Mapping[str, float], costs: Mapping[int, float]
) -> list[Panel]:
    """Return the panels of a sweep, without those that have nothing to show."""
    measured = [trial for trial in trials if trial.value is not None and _fits(sweep, trial)]
    panels = [
        _history(sweep, trials),
        _curves(sweep, trials),
        _parallel(sweep, measured),
        _importance(important),
        _folds(sweep, trials),
        _time(sweep, trials, costs),
        *_slices(sweep, measured),
    ]
    return [*_fronts(sweep, trials), *(panel for panel in panels if panel is not None)]


def _fits(sweep: SweepConfig, trial: TrialRecord) -> bool:
    """Return whether a trial is in the space; one that another program put into the storage may not be."""
    return all(
        key in trial.values and (not domain.choices or trial.values[key] in domain.choices)
        for key, domain in sweep.domains.items()
    )


def _described(sweep: SweepConfig, trial: TrialRecord) -> str:
    """Return a trial in a few lines, for the pointer."""
    measured = [f"{metric} {value:.6g}" for metric, value in zip(sweep.metrics, trial.results, strict=False)]
    rows = [f"{', '.join(measured) or sweep.objective.metric} ({trial.state})"]
    rows += [f"{key} = {_shown(value)}" for key, value in trial.values.items()]
    return "\n".join(rows)


def _shown(value: Any) -> str:
    """Return a value of the config in a few letters."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 1]}…"


def _by_state(trials: Sequence[TrialRecord]) -> Iterator[tuple[str, list[TrialRecord]]]:
    """Yield the trials of each state that there is, what matters least first: it is drawn below the others."""
    for state in ("failed", "running", "pruned", "complete"):
        found = [trial for trial in trials if trial.state == state]
        if found:
            yield state, found


def _best_last(sweep: SweepConfig, trials: Sequence[TrialRecord]) -> Iterator[tuple[TrialRecord, dict[str, Any]]]:
    """Yield trials in the order to draw them, and how a trial's line looks."""
    best = best_of(sweep, trials)
    for state, group in _by_state(trials):
        for trial in group:
            if trial is not best:
                yield trial, {"group": state, "color": _COLORS[state], "width": 1.3, "opacity": 0.6}
    if best is not None:
        yield best, {"group": "best", "color": _COLORS["best"], "width": 2.5}


def _points(sweep: SweepConfig, trials: Sequence[TrialRecord], places: Places) -> list[Line]:
    """Return a mark for each trial, in the color of its state, and a star for the best."""
    there = [trial for trial in trials if trial.number in places]
    lines = [
        _marks(sweep, sorted(group, key=lambda trial: places[trial.number][0]), places, state)
        for state, group in _by_state(there)
    ]
    best = best_of(sweep, trials)
    return [*lines, _marks(sweep, [best], places, "best")] if best in there else lines


def _marks(sweep: SweepConfig, trials: Sequence[TrialRecord], places: Places, group: str) -> Line:
    at = [places[trial.number] for trial in trials]
    return Line(
        name=group, group=group, color=_COLORS[group], joined=False,
        mark="star" if group == "best" else "circle", x=[x for x, _ in at], y=[y for _, y in at],
        text=[f"trial {trial.number}: {_described(sweep, trial)}" for trial in trials],
    )  # fmt: skip


def _history(sweep: SweepConfig, trials: Sequence[TrialRecord]) -> Panel:
    better = max if sweep.objective.mode == "max" else min
    x, y = list[float](), list[float | None]()
    so_far: float | None = None
    for trial in trials:
        if trial.state == "complete" and trial.value is not None:
            # A stair: it is the best until the next one is better.
            x, y = [*x, trial.number], [*y, so_far]
            so_far = trial.value if so_far is None else better(so_far, trial.value)
            x, y = [*x, trial.number], [*y, so_far]
    if trials and x and x[-1] < trials[-1].number:
        x, y = [*x, trials[-1].number], [*y, so_far]
    stair = Line(name="best so far", group="best", color=_COLORS["best"], x=x, y=y, width=1.5, hover=False)
    failed = [trial for trial in trials if trial.state == "failed"]
    flags = [{"x": trial.number, "text": f"trial {trial.number} failed"} for trial in failed]
    below = Line(
        name="failed", group="failed", color=_COLORS["failed"], joined=False, hover=False,
        x=[trial.number for trial in failed], y=[None] * len(failed), flags=flags,
    )  # fmt: skip
    measured = [trial for trial in trials if trial.value is not None]
    marks = _points(sweep, measured, {trial.number: (trial.number, trial.value) for trial in measured})
    return _panel(
        title="History", x="trial", y=sweep.objective.metric,
        lines=[*([below] if failed else []), *([stair] if x else []), *marks],
        xticks=_whole(len(trials)),
    )  # fmt: skip


def _whole(count: int) -> list[float]:
    """Some of the numbers of so many trials."""
    step = next(s for p in range(9) for s in (10**p, 2 * 10**p, 5 * 10**p) if s * 10 >= count)
    return [float(number) for number in range(0, max(count, 1), step)]


def _curves(sweep: SweepConfig, trials: Sequence[TrialRecord]) -> Panel | None:
    metric, lines = sweep.objective.metric, []
    for trial, style in _best_last(sweep, trials):
        for fold, curve in enumerate(trial.kept.get(CURVES, [])):
            steps, values = [int(step) for step, _ in curve], [float(value) for _, value in curve]
            if not steps:
                continue
            name = f"trial {trial.number}" + (f", fold {fold}" if sweep.folds is not None else "")
            about = _described(sweep, trial)
            text = [f"step {step}: {metric} {value:.6g}\n{about}" for step, value in zip(steps, values, strict=True)]
            lines.append(Line(name=name, x=steps, y=values, text=text, **style))
    return _panel(title="Learning curves", x="step", y=metric, lines=lines) if lines else None


class _Axis:
    """One upright axis of the parallel coordinates: values as places from 0 to 1."""

    def __init__(self, name: str, values: Sequence[Any], domain: Domain | None) -> None:
        self.name = name
        self._log = domain is not None and domain.is_log
        self._choices = list(domain.choices) if domain is not None else []
        if self._choices:
            count = len(self._choices)
            self._low, self._high = 0.0, float(max(count - 1, 1))
            every = -(-count // _MOST_LABELS)
            self.notes = [(self.place(c), _shown(c)) for c in self._choices[::every]]
            return
        ends = (domain.low, domain.high) if domain is not None else (min(values), max(values))
        self._low, self._high = map(self._turn, ends)
        self.notes = [(0.0, _shown(ends[0])), (1.0, _shown(ends[1]))]

    def _turn(self, value: float) -> float:
        return math.log10(value) if self._log else float(value)

    def place(self, value: Any) -> float:
        plain = float(self._choices.index(value)) if self._choices else self._turn(value)
        width = self._high - self._low
        return (plain - self._low) / width if width else 0.5


def _parallel(sweep: SweepConfig, measured: Sequence[TrialRecord]) -> Panel | None:
    if not measured:
        return None
    values = [trial.value for trial in measured]
    axes = [_Axis(key, (), domain) for key, domain in sweep.domains.items()]
    axes.append(_Axis(sweep.objective.metric, values, None))
    lines = [
        Line(
            name=f"trial {trial.number}", x=list(range(len(axes))),
            y=[axis.place(trial.values.get(axis.name, trial.value)) for axis in axes],
            text=[_described(sweep, trial)] * len(axes), **style,
        )
        for trial, style in _best_last(sweep, measured)
    ]  # fmt: skip
    notes = [{"x": at, "y": place, "text": text} for at, axis in enumerate(axes) for place, text in axis.notes]
    return _panel(
        title="Parallel coordinates", x="", full=True, lines=lines,
        xticks=list(range(len(axes))), xlabels=[axis.name for axis in axes], yticks=[], notes=notes,
        xrange=(-0.15, len(axes) - 0.6), yrange=(-0.06, 1.06), height=340,
    )  # fmt: skip


def _importance(important: Mapping[str, float]) -> Panel | None:
    if not important:
        return None
    rows = list(important.items())[::-1]
    lines = [
        Line(name=key, color=_COLORS["complete"], x=[0, value], y=[at, at], width=14,
             text=[f"importance {value:.3f}"] * 2)
        for at, (key, value) in enumerate(rows)
    ]  # fmt: skip
    return _panel(
        title="Importance of each key, by Optuna's estimate", x="share of the whole", lines=lines,
        yticks=list(range(len(rows))), ylabels=[key for key, _ in rows],
        yrange=(-0.6, len(rows) - 0.4), height=max(160, 60 + 30 * len(rows)),
    )  # fmt: skip


def _folds(sweep: SweepConfig, trials: Sequence[TrialRecord]) -> Panel | None:
    lines = []
    for state, group in _by_state([trial for trial in trials if trial.kept.get(FOLDS)]):
        spread_x, spread_y = list[float](), list[float | None]()
        x, y, text = list[float](), list[float | None](), list[str]()
        for trial in group:
            folds = [float(value) for value in trial.kept[FOLDS]]
            spread_x += [trial.number] * 3
            spread_y += [min(folds), max(folds), None]
            x += [trial.number] * len(folds)
            y += folds
            text += [f"fold {at}: {v:.6g}\n{_described(sweep, trial)}" for at, v in enumerate(folds)]
        color = _COLORS[state]
        spread = Line(name="spread", group=state, color=color, x=spread_x, y=spread_y, opacity=0.4,
                      width=5, hover=False)  # fmt: skip
        lines += [spread, Line(name="folds", group=state, color=color, x=x, y=y, text=text,
                               joined=False, mark="circle")]  # fmt: skip
    metric, ticks = sweep.objective.metric, _whole(len(trials))
    return _panel(title="Spread over folds", x="trial", y=metric, lines=lines, xticks=ticks) if lines else None


def _time(sweep: SweepConfig, trials: Sequence[TrialRecord], costs: Mapping[int, float]) -> Panel | None:
    known = {t.number: (1000 * costs[t.number], t.value) for t in trials if t.number in costs and t.value is not None}
    if not known:
        return None
    best = unbeaten({number: (time, sweep.signs[0] * value) for number, (time, value) in known.items()})
    line = _front([known[number] for number in best])
    title, x, y = "Value and time", "milliseconds per sample", sweep.objective.metric
    return _panel(title=title, x=x, y=y, lines=[line, *_points(sweep, trials, known)])


def _fronts(sweep: SweepConfig, trials: Sequence[TrialRecord]) -> Iterator[Panel]:
    """Yield a panel for each further objective; none if no trial is complete."""
    best = front(sweep, trials)
    done = [trial for trial in trials if len(trial.objectives) == len(sweep.metrics)]
    others = [trial for trial in done if trial not in best]
    for at, metric in enumerate(sweep.metrics[1:] if done else (), start=1):
        places = {trial.number: (trial.objectives[0], trial.objectives[at]) for trial in done}
        groups = {"complete": others, "Pareto front": best}
        lines = [_marks(sweep, group, places, name) for name, group in groups.items() if group]
        if len(sweep.metrics) == 2:  # with more, what is a front in all of them is no line in two
            lines.insert(0, _front([places[trial.number] for trial in best]))
        yield _panel(title="Pareto front", x=sweep.objective.metric, y=metric, lines=lines)


def _front(places: Sequence[tuple[float, float]]) -> Line:
    at = sorted(places)
    return Line(
        name="no trial is better in both", group="Pareto front", color=_COLORS["Pareto front"], width=1.3,
        x=[x for x, _ in at], y=[y for _, y in at], hover=False,
    )  # fmt: skip


def _slices(sweep: SweepConfig, measured: Sequence[TrialRecord]) -> Iterator[Panel]:
    for key, domain in sweep.domains.items() if measured else ():
        choices = list(domain.choices)
        places = {
            trial.number: (choices.index(trial.values[key]) if choices else trial.values[key], trial.value)
            for trial in measured
        }
        yield _panel(
            title=f"Slice: {key}", x=key, y=sweep.objective.metric,
            lines=_points(sweep, measured, places), xlog=domain.is_log,
            xticks=list(range(len(choices))) if choices else None,
            xrange=(-0.5, len(choices) - 0.5) if choices else None,
            xlabels=[_shown(choice) for choice in choices] if choices else None,
        )  # fmt: skip
