"""Presents times of steps on growing numbers of ranks. No torch here."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from samestep.bench.document import Document
from samestep.bench.presentation import Presentation, Table
from samestep.bench.scaling_panels import efficiency_panels, phase_panels
from samestep.bench.scaling_plan import PHASES, SAMESTEP, WEAK
from samestep.bench.statistics import Spread, spread_of
from samestep.report.format import format_bytes, format_seconds
from samestep.words import counted

_SLOW, _SURELY = 1.2, 1.1
"""A rank is slow that computes so many times as long as the median rank; its range must be above the second."""


@dataclass(frozen=True)
class RankStep:
    """Seconds of one rank in one step."""

    data: float
    compute: float
    exchange: float
    """Also while others are not there yet."""
    update: float


@dataclass(frozen=True)
class Cores:
    """The cores that a rank may run on."""

    host: str
    allowed: tuple[int, ...]
    """The CPUs that it may run on."""
    owned: int
    """Number of them that a container or a batch system grants, at most."""
    threads: int


def share_cores(ranks: Sequence[Cores]) -> bool:
    """Return whether the threads of all ranks of some host are more than its CPUs."""
    for host in {one.host for one in ranks}:
        here = [one for one in ranks if one.host == host]
        together = {cpu for one in here for cpu in one.allowed}
        # Ranks that are bound to CPUs have some each; else all have the same, and may be granted fewer.
        bound = any(set(one.allowed) != together for one in here)
        cpus = len(together) if bound else min(one.owned for one in here)
        if sum(one.threads for one in here) > cpus:
            return True
    return False


def split_step(ranks: Sequence[RankStep]) -> dict[str, float]:
    """Seconds of each phase of one step, the mean over its ranks.

    A rank that comes to the exchange before the slowest one waits for it, at most for as long as it was
    in the exchange at all; only the rest is what the exchange takes.
    """
    slowest = max(one.data + one.compute for one in ranks)
    waits = [min(one.exchange, slowest - one.data - one.compute) for one in ranks]
    sums = {
        "data": sum(one.data for one in ranks),
        "compute": sum(one.compute for one in ranks),
        "exchange": sum(one.exchange for one in ranks) - sum(waits),
        "update": sum(one.update for one in ranks),
        "wait": sum(waits),
    }
    return {name: total / len(ranks) for name, total in sums.items()}


def phases_of(steps: Sequence[Sequence[RankStep]]) -> dict[str, Spread]:
    """Return the spread of each phase over steps, each a list of what its ranks took."""
    splits = [split_step(ranks) for ranks in steps]
    return {name: spread_of([split[name] for split in splits]) for name in PHASES}


def slow_ranks(steps: Sequence[Sequence[RankStep]]) -> list[dict[str, Any]]:
    """Ranks that compute clearly longer than the median one, the slowest first, and how many times as long."""
    found = []
    for rank in range(len(steps[0])):
        # The lower one of two in the middle: of two ranks, the faster one.
        times = spread_of(
            [ranks[rank].compute / statistics.median_low(one.compute for one in ranks) for ranks in steps]
        )
        if times.median >= _SLOW and times.low >= _SURELY:
            found.append({"rank": rank, **asdict(times)})
    return sorted(found, key=lambda one: -one["median"])


def describe_slow(row: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each slow rank of a row of results."""
    if not row["slow_ranks"]:
        return []
    hosts = {one["rank"]: one["host"] for one in row["ranks"]}
    wait = row["phases"]["wait"]["median"] / row["median"]
    return [
        f"{row['mode']} scaling, {row['world']} ranks: rank {one['rank']} ({hosts[one['rank']]}) computes "
        f"{one['median']:.2g}x as long as the median rank; {wait:.0%} of a step is waiting for the slowest"
        for one in row["slow_ranks"]
    ]


Row = Mapping[str, Any]


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
    """Return the rows of all worlds, each with its efficiency against the fewest ranks of the same work."""
    found = []
    for row in rows:
        smallest = min((one for one in rows if _work(one) == _work(row)), key=lambda one: one["world"])
        if row["world"] > smallest["world"]:
            row = {**row, "efficiency": asdict(efficiency_of(row["mode"], smallest, row))}
        found.append(dict(row))
    return found


def _work(row: Row) -> tuple[Any, ...]:
    """Return what must be the same for two worlds to be points of one curve."""
    batch = row["global_batch"] / (row["world"] if row["mode"] == WEAK else 1)
    return batch, row["mode"], row["workload"], row["variant"], row["precision"]


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


STEP_COLUMNS = (
    "mode", "ranks", "loop", "lanes", "batch", "step", "95 % range", "samples/s", "efficiency", "to DDP", "noise",
)  # fmt: skip
_UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "us"))
PHASE_COLUMNS = ("mode", "ranks", *PHASES, "memory of a rank")


def present(document: Document) -> Presentation:
    """Return how it is shown: efficiency against ranks, the split of a step, and all rows."""
    rows = document.rows
    split = [row for row in rows if row["phases"] is not None]
    drawn = [("", row) for row in rows]
    compared = [("", row) for row in rows if row["efficiency"] is not None or _has_larger(row, rows)]
    tables = [
        Table(
            "Steps", STEP_COLUMNS, [_step_cells(row) for row in rows],
            "Efficiency is against the same loop on the fewest ranks; to DDP is the median of the rounds' ratios, "
            "with its 95 % range; noise is the ratio of one loop measured twice.",
        ),
        Table(
            "Where a step's time goes", PHASE_COLUMNS, [_phase_cells(row) for row in split],
            "Of samestep, in steps of their own: wait is for the slowest rank, exchange what is left of it and not "
            "hidden behind the backward pass.",
        ),
    ]  # fmt: skip
    return Presentation(
        title="What more ranks bring",
        heading=_heading(document),
        panels=[*efficiency_panels(compared), *phase_panels(drawn)],
        tables=tables,
        verdicts=verdicts(rows),
    )


def _has_larger(row: Row, rows: Sequence[Row]) -> bool:
    """Return whether other rows are compared with this one, the one on the fewest ranks."""
    alike = [other for other in rows if all(other[key] == row[key] for key in ("mode", "workload", "variant"))]
    return any(other["world"] > row["world"] for other in alike)


def _heading(document: Document) -> str:
    rows = document.rows
    rounds = max(len(row["seconds"]) for row in rows)
    hosts = ", ".join(document.machine["hosts"])
    names = ", ".join(sorted({f"{row['workload']} in {row['precision']}" for row in rows}))
    return f"{names} on {hosts} ({document.machine['device']}); medians of {rounds} rounds"


def shown_spread(found: Mapping[str, float] | None, digits: int = 2) -> str:
    """Return a ratio with its range."""
    if found is None:
        return "-"
    return f"{found['median']:.{digits}f} ({found['low']:.{digits}f} - {found['high']:.{digits}f})"


def _step_cells(row: Row) -> tuple[str, ...]:
    return (
        row["mode"],
        str(row["world"]),
        row["variant"],
        str(row["lanes"]),
        str(row["global_batch"]),
        format_seconds(row["median"]),
        f"{format_seconds(row['low'])} - {format_seconds(row['high'])}",
        f"{row['samples_per_second']:.4g}",
        shown_spread(row["efficiency"]),
        "-" if row["variant"] == "ddp" else shown_spread(row["ratio_to_ddp"], 3),
        "-" if row["control"] is None else f"{row['control']['median']:.3f}",
    )


def _phase_cells(row: Row) -> tuple[str, ...]:
    phases = [_phase(row["phases"][name]) for name in PHASES]
    memory = max(one["memory_bytes"] for one in row["ranks"])
    return (row["mode"], str(row["world"]), *phases, format_bytes(memory))


def _phase(found: Mapping[str, Any]) -> str:
    """Return a time with its range, in one unit."""
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if found["high"] * scale >= 1), _UNITS[-1])
    median, low, high = (f"{scale * found[name]:.3g}" for name in ("median", "low", "high"))
    return f"{median} ({low} - {high}) {unit}"
