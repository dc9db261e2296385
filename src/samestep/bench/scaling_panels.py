"""Curves and bars of scaling: worlds beside each other, and in a report also machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from samestep.bench.scaling_plan import PHASES, SAMESTEP, STRONG, WEAK
from samestep.bench.statistics import Spread
from samestep.report.chart import COLORS, Line, Panel
from samestep.report.format import format_seconds

_IDEAL, _GREY = "ideal", "#8793a0"
_FLOOR = {WEAK: 0.9, STRONG: 0.8}
"""The least efficiency of the targets, which is drawn."""

Rows = Sequence[tuple[str, Mapping[str, Any]]]
"""Rows of scaling, each with the label of its machine; empty if there is one only."""


def efficiency_panels(rows: Rows) -> list[Panel]:
    """Efficiency of each workload and mode over worlds."""
    colors = _colors(_curves(rows, "variant"))
    return [
        _efficiency_panel(mode, workload, found, colors)
        for workload in _unique(row["workload"] for _, row in rows)
        for mode in (WEAK, STRONG)
        if (found := _of(rows, mode=mode, workload=workload))
    ]


def throughput_panels(rows: Rows) -> list[Panel]:
    """Our throughput of all workloads, for each mode."""
    rows = _of(rows, variant=SAMESTEP)
    colors = _colors(_curves(rows, "workload"))
    return [_throughput_panel(mode, found, colors) for mode in (WEAK, STRONG) if (found := _of(rows, mode=mode))]


def phase_panels(rows: Rows) -> list[Panel]:
    """Return where the time of our steps goes: a bar for each world, stacked."""
    rows = [(label, row) for label, row in rows if row["phases"]]
    return [
        _phase_panel(f"{workload}: {mode} scaling, time of a step", found)
        for workload in _unique(row["workload"] for _, row in rows)
        for mode in (WEAK, STRONG)
        if (found := _of(rows, mode=mode, workload=workload))
    ]


def _colors(names: Iterable[str]) -> Mapping[str, str]:
    """Return the same in all panels, which share a legend."""
    return {name: COLORS[at % len(COLORS)] for at, name in enumerate(_unique(names))}


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _of(rows: Rows, **wanted: str) -> list[tuple[str, Mapping[str, Any]]]:
    return [(label, row) for label, row in rows if all(row[name] == value for name, value in wanted.items())]


def _curves(rows: Rows, by: str) -> dict[str, list[Mapping[str, Any]]]:
    """Rows by what distinguishes them: `by`, the precision if it is not fp32, and the machine."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for label, row in rows:
        words = [str(row[by]), "" if row["precision"] == "fp32" else row["precision"], label]
        groups.setdefault(", ".join(filter(None, words)), []).append(row)
    return {name: sorted(found, key=lambda row: row["world"]) for name, found in groups.items()}


def _worlds(rows: Rows) -> list[float]:
    return sorted({float(row["world"]) for _, row in rows})


def _efficiency_panel(mode: str, workload: str, rows: Rows, colors: Mapping[str, str]) -> Panel:
    lines = []
    for name, curve in _curves(rows, "variant").items():
        lines.append(_banded(name, colors[name], [(row, _efficiency_or_one(row)) for row in curve]))
    worlds = _worlds(rows)
    ends = [worlds[0], worlds[-1]]
    lines.append(_level(_IDEAL, ends, 100.0))
    floor = 100 * _FLOOR[mode]
    lines.append(_level("target", ends, floor, "#b3261e"))
    return Panel(
        title=f"{workload}: {mode} scaling", lines=lines, x="ranks", y="efficiency, %",
        xlog=len(worlds) > 1, xticks=worlds,
    )  # fmt: skip


def _efficiency_or_one(row: Mapping[str, Any]) -> Spread:
    """Return 1 for the smallest world, which the others are compared with."""
    return Spread(1.0, 1.0, 1.0) if row["efficiency"] is None else Spread.of(row["efficiency"])


def _level(name: str, ends: Sequence[float], height: float, color: str = _GREY) -> Line:
    return Line(name=name, group=name, x=ends, y=[height] * len(ends), color=color, width=1, dash="dash", hover=False)


def _banded(name: str, color: str, known: Sequence[tuple[Mapping[str, Any], Spread]]) -> Line:
    return Line(
        name=name, group=name, x=[float(row["world"]) for row, _ in known],
        y=[100 * one.median for _, one in known], low=[100 * one.low for _, one in known],
        high=[100 * one.high for _, one in known], color=color, mark="circle",
        text=[f"{format_seconds(row['median'])} a step" for row, _ in known],
    )  # fmt: skip


def _throughput_panel(mode: str, rows: Rows, colors: Mapping[str, str]) -> Panel:
    lines = []
    for name, curve in _curves(rows, "workload").items():
        color = colors[name]
        worlds = [float(row["world"]) for row in curve]
        rates = [_rate(row) for row in curve]
        lines.append(
            Line(
                name=name, group=name, x=worlds, y=[one.median for one in rates],
                low=[one.low for one in rates], high=[one.high for one in rates], color=color,
                mark="circle", text=[f"{format_seconds(row['median'])} a step" for row in curve],
            )
        )  # fmt: skip
        first = rates[0].median / worlds[0]
        lines.append(
            Line(
                name=f"{name}, ideal", group=name, x=worlds,
                y=[first * world for world in worlds], color=color, width=1, dash="dash", hover=False,
            )
        )  # fmt: skip
    worlds = _worlds(rows)
    return Panel(
        title=f"{mode} scaling: throughput", lines=lines, x="ranks", y="samples a second",
        xlog=len(worlds) > 1, ylog=True, xticks=worlds,
    )  # fmt: skip


def _rate(row: Mapping[str, Any]) -> Spread:
    took = Spread.of(row)
    return Spread(*(row["global_batch"] / part for part in (took.median, took.high, took.low)))


def _phase_panel(title: str, rows: Rows) -> Panel:
    several = [name for name in ("precision", "backend") if len({r[name] for _, r in rows}) > 1]
    bars = sorted(rows, key=lambda one: (one[0], one[1]["world"]))
    labels = [
        ", ".join(filter(None, [str(row["world"]), *(row[name] for name in several), label])) for label, row in bars
    ]
    base = [0.0] * len(bars)
    lines = []
    for number, phase in enumerate(PHASES):
        parts = [row["phases"].get(phase) for _, row in bars]
        if not any(parts):
            continue
        tops = [begin + (1e3 * part["median"] if part else 0.0) for begin, part in zip(base, parts, strict=True)]
        lines.append(
            Line(
                name=phase, group=phase, x=list(map(float, range(len(bars)))), y=tops, base=base,
                bar=0.7, color=COLORS[number], text=[_range_of(part) for part in parts],
            )
        )  # fmt: skip
        base = tops
    return Panel(
        title=title, lines=lines, x="ranks", y="ms", full=max(map(len, labels)) * len(labels) > 60,
        xticks=list(map(float, range(len(bars)))), xlabels=labels, zero=True, alone=True,
        xrange=(-0.6, len(bars) - 0.4),
    )  # fmt: skip


def _range_of(part: Mapping[str, float] | None) -> str:
    if part is None:
        return ""
    return f"ms ({format_seconds(max(0.0, part['low']))} to {format_seconds(part['high'])})"
