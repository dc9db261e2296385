"""Efficiencies of rows that come from several files: each against the smallest world of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from samestep.bench.report.fields import Row, spread
from samestep.bench.statistics import Spread


@dataclass(frozen=True)
class Placed:
    """A row, and which document it is of."""

    row: Row
    document: int
    config: str

    @property
    def work(self) -> tuple[object, ...]:
        """What must be the same for two worlds to be points of one curve."""
        row = self.row
        batch = row["global_batch"] / (row["world"] if row["mode"] == "weak" else 1)
        names = ("mode", "workload", "contestant", "precision")
        return (self.config, batch, *(row[name] for name in names))


def with_efficiencies(rows: Sequence[Placed]) -> list[Row]:
    """The rows; where the smallest world is in another document, with the efficiency against that.

    A document's own efficiencies are of rounds that were measured in turns, and are kept.
    """
    smallest: dict[tuple[object, ...], Placed] = {}
    for one in rows:
        base = smallest.get(one.work)
        if base is None or one.row["world"] < base.row["world"]:
            smallest[one.work] = one
    found = []
    for one in rows:
        base = smallest.get(one.work)
        own = (
            one.row["efficiency"] is not None and base is not None and base.document == one.document
        )
        if base is None or own or one.row["world"] <= base.row["world"]:
            found.append(one.row)
        else:
            found.append({**one.row, "efficiency": asdict(efficiency(base.row, one.row))})
    return found


def efficiency(base: Row, row: Row) -> Spread:
    """Which share of ideal scaling a world reaches, against a smaller one of another measurement.

    The range is the widest that the two ranges allow.
    """
    before, now = spread(base), spread(row)
    ideal = base["world"] / row["world"] if row["mode"] == "strong" else 1.0
    return Spread(
        ideal * before.median / now.median,
        ideal * before.low / now.high,
        ideal * before.high / now.low,
    )
