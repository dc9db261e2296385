"""Figures from the times of steps: ratios, efficiency, and their verdicts. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from samestep.bench.scaling_plan import SAMESTEP, WEAK
from samestep.bench.statistics import Spread, spread_of
from samestep.bench.step_phases import describe_slow
from samestep.words import counted

Row = Mapping[str, Any]


def ratio_of(reference: Sequence[float], seconds: Sequence[float]) -> Spread:
    """Return the spread of the rounds' ratios: what disturbs a whole round disturbs both."""
    return spread_of([mine / other for mine, other in zip(seconds, reference, strict=True)])


def efficiency_of(mode: str, smallest: Row, row: Row) -> Spread:
    """Return how much of what the ranks could do is done, against the same variant on the fewest ranks.

    Weak: the time of a step should stay. Strong: it should shrink as the ranks grow.
    """
    share = 1.0 if mode == WEAK else smallest["world"] / row["world"]
    # They were measured one after the other, in no common rounds: the widest range is the honest one.
    return Spread(
        share * smallest["median"] / row["median"],
        share * smallest["low"] / row["high"],
        share * smallest["high"] / row["low"],
    )


def with_efficiency(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows of all worlds, each with its efficiency; that of the fewest ranks has none."""
    found = []
    for row in rows:
        same = [one for one in rows if _series(one) == _series(row)]
        smallest = min(same, key=lambda one: one["world"])
        is_smallest = row["world"] == smallest["world"]
        efficiency = None if is_smallest else asdict(efficiency_of(row["mode"], smallest, row))
        found.append({**row, "efficiency": efficiency})
    return found


def _series(row: Row) -> tuple[Any, ...]:
    return row["mode"], row["workload"], row["variant"], row["precision"]


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Return what a reader should know before reading the figures, in a sentence each."""
    ours = [row for row in rows if row["variant"] == SAMESTEP]
    found = [line for row in ours for line in describe_slow(row)]
    for row in ours:
        place = f"{row['mode']} scaling, {counted(row['world'], 'rank')}"
        control = row["control"]
        if control is not None and not control["low"] <= 1.0 <= control["high"]:
            found.append(
                f"{place}: the same loop measured twice differs by {abs(control['median'] - 1):.0%} "
                f"({control['low']:.3f} - {control['high']:.3f}): smaller differences say nothing"
            )
        found += [f"{place}: {name} is left out: {why}" for name, why in row["left_out"].items()]
    crowded = sorted({row["world"] for row in ours if row["shares_cores"]})
    if crowded:
        worlds = ", ".join(map(str, crowded))
        found.append(
            f"{worlds} ranks share cores on this machine: their times, and efficiencies, are not those of "
            "ranks with cores of their own"
        )
    return list(dict.fromkeys(found))
