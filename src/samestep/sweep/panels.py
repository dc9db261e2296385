"""The plots of a sweep: its trials as panels, for a picture or a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from samestep.report.chart import Line, Panel
from samestep.sweep.schema import SweepConfig
from samestep.sweep.space import Domain
from samestep.sweep.storage import CURVES, FOLDS, TrialRecord, best_of

COLORS = {"complete": "#1f5f99", "pruned": "#9aa5af", "running": "#12703c", "failed": "#b3261e"}
BEST = "#c2571a"
_MOST_LABELS = 8
_LONGEST_LABEL = 18


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
        _pareto(sweep, trials, costs),
        *_slices(sweep, measured),
        _timeline(trials),
    ]
    return [panel for panel in panels if panel is not None]


def _fits(sweep: SweepConfig, trial: TrialRecord) -> bool:
    """Return whether a trial is in the space; one that another program put into the storage may not be."""
    return all(
        key in trial.values and (not domain.choices or trial.values[key] in domain.choices)
        for key, domain in sweep.domains.items()
    )


def described(sweep: SweepConfig, trial: TrialRecord) -> str:
    """Return a trial in a few lines, for the pointer."""
    value = "" if trial.value is None else f" {trial.value:.6g}"
    rows = [f"{sweep.objective.metric}{value} ({trial.state})"]
    rows += [f"{key} = {shown(value)}" for key, value in trial.values.items()]
    return "\n".join(rows)


def shown(value: Any) -> str:
    """Return a value of the config in a few letters."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 1]}…"


def by_state(trials: Sequence[TrialRecord]) -> Iterator[tuple[str, list[TrialRecord]]]:
    """Yield the trials of each state that there is, what matters least first: it is drawn below the others."""
    for state in ("failed", "running", "pruned", "complete"):
        found = [trial for trial in trials if trial.state == state]
        if found:
            yield state, found


def points(
    sweep: SweepConfig, trials: Sequence[TrialRecord], places: Mapping[int, float], heights: Mapping[int, float | None]
) -> list[Line]:
    """Return a mark for each trial, in the color of its state, and a star for the best."""
    lines = []
    best = best_of(sweep, list(trials))
    for state, group in by_state([trial for trial in trials if trial.number in places]):
        ordered = sorted(group, key=lambda trial: places[trial.number])
        lines.append(_marks(sweep, ordered, places, heights, state, COLORS[state]))
    if best is not None and best.number in places:
        lines.append(_marks(sweep, [best], places, heights, "best", BEST))
    return lines


def _marks(
    sweep: SweepConfig,
    trials: Sequence[TrialRecord],
    places: Mapping[int, float],
    heights: Mapping[int, float | None],
    group: str,
    color: str,
) -> Line:
    numbers = [trial.number for trial in trials]
    return Line(
        name=group, group=group, color=color, joined=False,
        mark="star" if group == "best" else "circle",
        x=[places[number] for number in numbers], y=[heights.get(number) for number in numbers],
        text=[f"trial {trial.number}: {described(sweep, trial)}" for trial in trials],
    )  # fmt: skip


def _values(trials: Sequence[TrialRecord]) -> dict[int, float | None]:
    return {trial.number: trial.value for trial in trials}


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
    stair = Line(name="best so far", group="best", color=BEST, x=x, y=y, width=1.5, hover=False)
    failed = [trial for trial in trials if trial.state == "failed"]
    flags = [{"x": trial.number, "text": f"trial {trial.number} failed"} for trial in failed]
    below = Line(
        name="failed", group="failed", color=COLORS["failed"], joined=False, hover=False,
        x=[trial.number for trial in failed], y=[None] * len(failed), flags=flags,
    )  # fmt: skip
    measured = [trial for trial in trials if trial.value is not None]
    places = {trial.number: float(trial.number) for trial in measured}
    marks = points(sweep, measured, places, _values(trials))
    return Panel(
        title="History", x="trial", y=sweep.objective.metric, alone=True, nearest=True, height=300,
        lines=[*([below] if failed else []), *([stair] if x else []), *marks],
        xticks=_whole(len(trials)),
    )  # fmt: skip


def _whole(count: int) -> list[float]:
    """Some of the numbers of so many trials."""
    step = next(s for p in range(9) for s in (10**p, 2 * 10**p, 5 * 10**p) if s * 10 >= count)
    return [float(number) for number in range(0, max(count, 1), step)]


def _curves(sweep: SweepConfig, trials: Sequence[TrialRecord]) -> Panel | None:
    best = best_of(sweep, list(trials))
    lines = []
    order = [trial for _, group in by_state(trials) for trial in group if trial is not best]
    for trial in [*order, *([] if best is None else [best])]:
        group = "best" if trial is best else trial.state
        color = BEST if trial is best else COLORS[trial.state]
        for fold, curve in enumerate(trial.kept.get(CURVES, [])):
            steps, values = [int(step) for step, _ in curve], [float(v) for _, v in curve]
            if not steps:
                continue
            name = f"trial {trial.number}"
            name += f", fold {fold}" if sweep.folds is not None else ""
            lines.append(
                Line(
                    name=name, group=group, color=color, x=steps, y=values,
                    width=2.5 if trial is best else 1.3, opacity=1 if trial is best else 0.6,
                    text=[
                        f"step {s}: {sweep.objective.metric} {v:.6g}\n{described(sweep, trial)}"
                        for s, v in zip(steps, values, strict=True)
                    ],
                )
            )  # fmt: skip
    title, metric = "Learning curves", sweep.objective.metric
    panel = Panel(title=title, x="step", y=metric, alone=True, nearest=True, lines=lines, height=300)
    return panel if lines else None


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
            self.notes = [(self.place(c), shown(c)) for c in self._choices[::every]]
            return
        ends = (domain.low, domain.high) if domain is not None else (min(values), max(values))
        self._low, self._high = map(self._turn, ends)
        self.notes = [(0.0, shown(ends[0])), (1.0, shown(ends[1]))]

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
    best = best_of(sweep, list(measured))
    order = [trial for _, group in by_state(measured) for trial in group if trial is not best]
    lines = []
    for trial in [*order, *([] if best is None else [best])]:
        row = [*(trial.values[key] for key in sweep.domains), trial.value]
        lines.append(
            Line(
                name=f"trial {trial.number}", group="best" if trial is best else trial.state,
                color=BEST if trial is best else COLORS[trial.state],
                width=2.5 if trial is best else 1.3, opacity=1 if trial is best else 0.55,
                x=list(range(len(axes))),
                y=[axis.place(value) for axis, value in zip(axes, row, strict=True)],
                text=[described(sweep, trial)] * len(axes),
            )
        )  # fmt: skip
    notes = [{"x": at, "y": place, "text": text} for at, axis in enumerate(axes) for place, text in axis.notes]
    return Panel(
        title="Parallel coordinates", x="", alone=True, full=True, nearest=True, lines=lines,
        xticks=list(range(len(axes))), xlabels=[axis.name for axis in axes], yticks=[], notes=notes,
        xrange=(-0.15, len(axes) - 0.6), yrange=(-0.06, 1.06), height=340,
    )  # fmt: skip


def _importance(important: Mapping[str, float]) -> Panel | None:
    if not important:
        return None
    rows = list(important.items())[::-1]
    lines = [
        Line(name=key, color=COLORS["complete"], x=[0, value], y=[at, at], width=14,
             text=[f"importance {value:.3f}"] * 2)
        for at, (key, value) in enumerate(rows)
    ]  # fmt: skip
    return Panel(
        title="Importance of each key, by Optuna's estimate", x="share of the whole", lines=lines,
        alone=True, nearest=True, yticks=list(range(len(rows))), ylabels=[key for key, _ in rows],
        yrange=(-0.6, len(rows) - 0.4), height=max(160, 60 + 30 * len(rows)),
    )  # fmt: skip


def _folds(sweep: SweepConfig, trials: Sequence[TrialRecord]) -> Panel | None:
    lines = []
    for state, group in by_state([trial for trial in trials if trial.kept.get(FOLDS)]):
        spread_x, spread_y = list[float](), list[float | None]()
        x, y, text = list[float](), list[float | None](), list[str]()
        for trial in group:
            folds = [float(value) for value in trial.kept[FOLDS]]
            spread_x += [trial.number] * 3
            spread_y += [min(folds), max(folds), None]
            x += [trial.number] * len(folds)
            y += folds
            text += [f"fold {at}: {v:.6g}\n{described(sweep, trial)}" for at, v in enumerate(folds)]
        color = COLORS[state]
        spread = Line(name="spread", group=state, color=color, x=spread_x, y=spread_y, opacity=0.4,
                      width=5, hover=False)  # fmt: skip
        lines += [spread, Line(name="folds", group=state, color=color, x=x, y=y, text=text,
                               joined=False, mark="circle")]  # fmt: skip
    panel = Panel(
        title="Spread over folds", x="trial", y=sweep.objective.metric, lines=lines, alone=True,
        nearest=True, xticks=_whole(len(trials)), height=300,
    )  # fmt: skip
    return panel if lines else None


def _pareto(sweep: SweepConfig, trials: Sequence[TrialRecord], costs: Mapping[int, float]) -> Panel | None:
    known = [trial for trial in trials if trial.number in costs and trial.value is not None]
    if not known:
        return None
    times = {trial.number: 1000 * costs[trial.number] for trial in known}
    values = {trial.number: trial.value for trial in known if trial.value is not None}
    sign = -1.0 if sweep.objective.mode == "max" else 1.0
    front: list[int] = []
    for number in sorted(values, key=lambda number: (times[number], sign * values[number])):
        if not front or sign * values[number] < sign * values[front[-1]]:
            front.append(number)
    line = Line(
        name="no trial is faster and better", group="Pareto front", color="#7a3e9d", width=1.3,
        x=[times[number] for number in front], y=[values[number] for number in front], hover=False,
    )  # fmt: skip
    return Panel(
        title="Value and time", x="milliseconds per sample", y=sweep.objective.metric, alone=True,
        nearest=True, lines=[line, *points(sweep, known, times, _values(known))], height=300,
    )  # fmt: skip


def _slices(sweep: SweepConfig, measured: Sequence[TrialRecord]) -> Iterator[Panel]:
    for key, domain in sweep.domains.items() if measured else ():
        choices = list(domain.choices)
        places: dict[int, float] = {
            trial.number: choices.index(trial.values[key]) if choices else trial.values[key] for trial in measured
        }
        yield Panel(
            title=f"Slice: {key}", x=key, y=sweep.objective.metric, alone=True, nearest=True,
            lines=points(sweep, measured, places, _values(measured)), height=280, xlog=domain.is_log,
            xticks=list(range(len(choices))) if choices else None,
            xrange=(-0.5, len(choices) - 0.5) if choices else None,
            xlabels=[shown(choice) for choice in choices] if choices else None,
        )  # fmt: skip


def _timeline(trials: Sequence[TrialRecord]) -> Panel | None:
    begun = [trial for trial in trials if trial.frozen.datetime_start is not None]
    if not begun:
        return None
    first = min(trial.frozen.datetime_start for trial in begun)
    lines = []
    for trial in begun:
        start = (trial.frozen.datetime_start - first).total_seconds()
        ended = trial.frozen.datetime_complete
        # One that runs, or was killed: nobody knows here which.
        end = start if ended is None else (ended - first).total_seconds()
        last = "not over" if ended is None else f"{end - start:.1f} s"
        lines.append(
            Line(
                name=f"trial {trial.number}", group=trial.state, color=COLORS[trial.state], width=7,
                x=[start] if ended is None else [start, end],
                y=[trial.number] if ended is None else [trial.number] * 2,
                text=[f"from {start:.1f} s: {last} ({trial.state})"] * 2,
            )
        )  # fmt: skip
    return Panel(
        title="Timeline", x="seconds since the first trial began", y="trial", lines=lines,
        alone=True, nearest=True, full=True, yticks=_whole(len(trials)),
        yrange=(-0.7, len(trials) - 0.3), height=min(600, 90 + 14 * len(trials)),
    )  # fmt: skip
