"""Presents times of a step's data: whether it is the bottleneck, and which workers to take. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.bench.document import Document
from samestep.bench.presentation import Presentation, Table
from samestep.bench.statistics import WORTH
from samestep.report.chart import COLORS, Line, Panel
from samestep.report.format import format_seconds
from samestep.words import counted

Row = Mapping[str, Any]

COLUMNS = ("ranks", "workers", "read ahead", "data of a step", "95 % range", "rest of a step", "times the rest", "")


def reading_of(row: Row) -> Reading:
    """Return what a row says of a way to read."""
    return Reading(row["workers"], row["prefetch"], row["median"], row["step_seconds"]["median"])


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of the table of all ways."""
    return [
        (
            str(row["world"]),
            str(row["workers"]),
            str(row["prefetch"]),
            format_seconds(row["median"]),
            f"{format_seconds(row['low'])} - {format_seconds(row['high'])}",
            format_seconds(row["step_seconds"]["median"]),
            f"{row['median'] / row['step_seconds']['median']:.2f}",
            ", ".join(
                word
                for word, holds in (("bottleneck", row["bottleneck"]), ("recommended", row["recommended"]))
                if holds
            ),
        )
        for row in rows
    ]


def verdict(rows: Sequence[Row]) -> str:
    """Return whether data is the bottleneck at one number of ranks, and what to set."""
    fewest = reading_of(min(rows, key=lambda row: (row["workers"], row["prefetch"])))
    best = reading_of(next(row for row in rows if row["recommended"]))
    ranks = f"On {counted(rows[0]['world'], 'rank')}"
    found = (
        f"data takes {_times(fewest)} the rest of a step ({format_seconds(fewest.data)} against "
        f"{format_seconds(fewest.rest)}) with {_workers(fewest)}"
    )
    if best == fewest:
        worth = "it stays the bottleneck" if best.is_bottleneck else "it is no bottleneck"
        return f"{ranks} {found}; more of them are no faster, {worth}. Set {_set(best)}."
    left = "still the bottleneck" if best.is_bottleneck else "no longer the bottleneck"
    return (
        f"{ranks} {found}; with {_workers(best)} {_times(best)}, {left}. Set {_set(best)}: a step then takes "
        f"about {format_seconds(best.step)} instead of {format_seconds(fewest.step)}."
    )


def _times(reading: Reading) -> str:
    return f"{reading.data / reading.rest:.2g}x"


def _workers(reading: Reading) -> str:
    return f"{reading.workers} worker(s)" if reading.workers else "no workers"


def _set(reading: Reading) -> str:
    return " ".join(reading.overrides)


def by_world(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Return the rows of each number of ranks."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row["world"], []).append(row)
    return found


def present(document: Document) -> Presentation:
    """Return how it is shown: every way, and what to set."""
    machine, rows = document.machine, document.rows
    rounds = max(len(row["seconds"]) for row in rows)
    note = "A step waits for its data if there are no workers, or if they are slower than the rest of the step."
    return Presentation(
        title="Whether data is the bottleneck",
        heading=f"{machine['task']} on {', '.join(machine['hosts'])} ({machine['device']}); medians of {rounds} rounds",
        panels=[_panel(world, found) for world, found in by_world(rows).items()],
        tables=[Table("Data of a step", COLUMNS, cells(rows), note)],
        verdicts=[verdict(found) for found in by_world(rows).values()],
    )


def _panel(world: int, rows: Sequence[Row]) -> Panel:
    rest, workers = rows[0]["step_seconds"], sorted({row["workers"] for row in rows})
    lines = [
        Line(
            name="the rest of a step", group="the rest of a step", x=[workers[0], workers[-1]],
            y=[1e3 * rest["median"]] * 2, low=[1e3 * rest["low"]] * 2, high=[1e3 * rest["high"]] * 2,
            color=COLORS[0], dash="dash",
        )
    ]  # fmt: skip
    ahead = sorted({row["prefetch"] for row in rows} - {0}) or [0]
    for number, prefetch in enumerate(ahead):
        found = sorted((row for row in rows if row["prefetch"] in (0, prefetch)), key=lambda row: row["workers"])
        lines.append(
            Line(
                name=f"{prefetch} read ahead", group=f"{prefetch} read ahead", mark="circle",
                x=[row["workers"] for row in found], y=[1e3 * row["median"] for row in found],
                low=[1e3 * row["low"] for row in found], high=[1e3 * row["high"] for row in found],
                color=COLORS[(number + 1) % len(COLORS)],
            )
        )  # fmt: skip
    return Panel(
        title=f"data of a step, {counted(world, 'rank')}", lines=lines, x="workers", y="ms", xticks=workers, zero=True
    )


@dataclass(frozen=True)
class Reading:
    """One way to read, and what it takes for a step."""

    workers: int
    prefetch: int
    """0 without workers: nothing is read ahead."""
    data: float
    """Seconds for a step's batches, as fast as they come."""
    rest: float
    """Seconds of the rest of a step."""

    @property
    def step(self) -> float:
        """Seconds of a step: workers read while it computes, without them it waits."""
        return max(self.data, self.rest) if self.workers else self.data + self.rest

    @property
    def is_bottleneck(self) -> bool:
        """Return whether steps wait for data for more than a tenth of the rest."""
        return self.step > WORTH * self.rest

    @property
    def overrides(self) -> list[str]:
        """Return what to set for it."""
        ahead = [f"loader.prefetch={self.prefetch}"] if self.workers else []
        return [f"loader.workers={self.workers}", *ahead]


def recommended(readings: Sequence[Reading]) -> Reading:
    """Return the one with the fewest workers, and the least read ahead, among those that are as fast as any."""
    fastest = min(reading.step for reading in readings)
    good = [reading for reading in readings if reading.step <= WORTH * fastest]
    return min(good, key=lambda reading: (reading.workers, reading.prefetch))


def settings(workers: Sequence[int], prefetch: Sequence[int]) -> list[tuple[int, int]]:
    """Return what is tried: every number of workers with everything read ahead, no workers once."""
    found = [(count, ahead if count else 0) for count in workers for ahead in prefetch]
    return list(dict.fromkeys(found))
