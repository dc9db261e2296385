"""Two sets of results: what got slower or faster, and whether that is more than noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from samestep.bench.report.fields import Row, describe, identity
from samestep.bench.report.results import Result
from samestep.bench.report.targets import OURS, format_ratio
from samestep.bench.statistics import Spread, ratio_confidence_interval
from samestep.report.format import format_bytes, format_seconds

TOLERANCE = 0.05
"""A change by less is none: two runs of the same differ by some percent on most machines."""
Verdict = Literal["slower", "faster", "larger", "smaller", "no difference", "too few rounds"]
_WORSE: Sequence[Verdict] = ("slower", "larger")
_CAUTIONS = ("hosts", "device", "cpus", "system", "python", "torch", "samestep", "config", "task")
COLUMNS = ("what", "before", "now", "now / before", "verdict")


@dataclass(frozen=True)
class Change:
    """One figure, before and now."""

    what: str
    before: float
    now: float
    unit: Literal["seconds", "bytes"]
    ratio: Spread | None
    """How many times larger it is now; None if there are too few rounds for a range."""
    verdict: Verdict
    ours: bool
    """Whether it is of samestep; else of something that is measured beside it."""

    @property
    def is_worse(self) -> bool:
        """Return whether a later version must not be like that."""
        return self.ours and self.verdict in _WORSE

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table."""
        shown = format_seconds if self.unit == "seconds" else format_bytes
        ratio = "-" if self.ratio is None else format_ratio(self.ratio)
        return (self.what, shown(self.before), shown(self.now), ratio, self.verdict)


@dataclass(frozen=True)
class Comparison:
    """Everything that is in both sets of results."""

    changes: Sequence[Change]
    cautions: Sequence[str]
    """Why a difference may have other causes than the code."""
    tolerance: float

    @property
    def worse(self) -> list[Change]:
        """Return what got significantly slower, or larger."""
        return [change for change in self.changes if change.is_worse]

    @property
    def changed(self) -> list[Change]:
        """Return what is another than before; the most first."""
        found = [c for c in self.changes if c.verdict not in ("no difference", "too few rounds")]
        return sorted(found, key=lambda change: change.before / change.now)

    @property
    def unchanged(self) -> list[Change]:
        """Return what is as before, as far as that can be told."""
        return [change for change in self.changes if change.verdict == "no difference"]

    @property
    def undecided(self) -> list[Change]:
        """Return what was measured in too few rounds."""
        return [change for change in self.changes if change.verdict == "too few rounds"]

    @property
    def summary(self) -> str:
        """Return what was found, in one line."""
        counts = {
            verdict: sum(change.verdict == verdict for change in self.changes)
            for verdict in dict.fromkeys(change.verdict for change in self.changes)
        }
        told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        told += " (both must be measured without --quick)" if self.undecided else ""
        return (
            f"{len(self.changes)} figures compared: {told}. A change counts if the 95 % range of the ratio "
            f"excludes 1, and it is more than {100 * self.tolerance:g} %"
        )

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "worse": len(self.worse),
            "tolerance": self.tolerance,
            "cautions": list(self.cautions),
            "changes": [asdict(change) for change in self.changes],
        }


@dataclass(frozen=True)
class _Figure:
    """A row that can be compared."""

    row: Row
    result: Result

    @property
    def key(self) -> tuple[object, ...]:
        return identity(self.result.document.kind, self.row)

    @property
    def values(self) -> Sequence[float]:
        """Return the values of the rounds, if there are such."""
        found: Sequence[float] = self.row.get("seconds") or ()
        return found


_LEVELS: Sequence[Callable[[_Figure], tuple[object, ...]]] = (
    lambda one: (one.result.key, one.result.config, *one.key),
    lambda one: (one.result.key, *one.key),
    lambda one: (one.result.config, *one.key),
    lambda one: one.key,
)
"""What must be the same for two rows to be compared: as much as possible first."""


def compare(now: Sequence[Result], before: Sequence[Result], tolerance: float = TOLERANCE) -> Comparison:
    """Compare what both have measured."""
    late, early = _figures(now), _figures(before)
    pairs = list(_pairs(late, early))
    changes = [_change(new, old, tolerance) for new, old in pairs]
    cautions = [*_differing(now, before), *_unmatched(late, early, len(pairs))]
    if any(not c.ours and c.verdict == "slower" for c in changes):
        cautions.append("what is measured beside samestep is slower too: the machine may have changed")
    return Comparison(changes, cautions, tolerance)


def _figures(results: Sequence[Result]) -> list[_Figure]:
    return [
        _Figure(row, result)
        for result in results
        for row in result.document.rows
        if row.get("seconds") or _has_size(row)
    ]


def _has_size(row: Row) -> bool:
    """Not of what takes no memory: it has no ratio to anything."""
    return all(row.get(name) for name in ("measured_bytes", "low", "high"))


def _pairs(late: Sequence[_Figure], early: Sequence[_Figure]) -> Iterator[tuple[_Figure, _Figure]]:
    left, right = list(late), list(early)
    for level in _LEVELS:
        news, olds = _unique(left, level), _unique(right, level)
        common = [key for key in news if key in olds]
        for key in common:
            yield news[key], olds[key]
        taken = {id(news[key]) for key in common} | {id(olds[key]) for key in common}
        left = [one for one in left if id(one) not in taken]
        right = [one for one in right if id(one) not in taken]


def _unique(
    figures: Sequence[_Figure], level: Callable[[_Figure], tuple[object, ...]]
) -> dict[tuple[object, ...], _Figure]:
    """By what they have in common with others; without those that it does not tell apart."""
    found: dict[tuple[object, ...], list[_Figure]] = {}
    for one in figures:
        found.setdefault(level(one), []).append(one)
    return {key: several[0] for key, several in found.items() if len(several) == 1}


def _change(now: _Figure, before: _Figure, tolerance: float) -> Change:
    kind = now.result.document.kind
    what, ours = describe(kind, now.row), now.row.get("variant", OURS) == OURS
    if now.values and before.values:
        ratio = ratio_confidence_interval(now.values, before.values)
        old, new = before.row["median"], now.row["median"]
        verdict = _verdict(ratio, tolerance, "slower", "faster")
        return Change(what, old, new, "seconds", ratio, verdict, ours)
    old, new = before.row["measured_bytes"], now.row["measured_bytes"]
    ratio = _ratio_of_ranges(now.row, before.row)
    verdict = _verdict(ratio, tolerance, "larger", "smaller")
    return Change(what, old, new, "bytes", ratio, verdict, ours)


def _ratio_of_ranges(now: Row, before: Row) -> Spread:
    """Return the ratio of sizes, which have a range and no rounds; the widest that the ranges allow."""
    return Spread(
        now["measured_bytes"] / before["measured_bytes"],
        now["low"] / max(1.0, before["high"]),
        now["high"] / max(1.0, before["low"]),
    )


def _verdict(ratio: Spread | None, tolerance: float, more: Verdict, less: Verdict) -> Verdict:
    if ratio is None:
        return "too few rounds"
    if ratio.low > 1 and ratio.median > 1 + tolerance:
        return more
    if ratio.high < 1 and ratio.median < 1 / (1 + tolerance):
        return less
    return "no difference"


def _differing(now: Sequence[Result], before: Sequence[Result]) -> Iterator[str]:
    for name in _CAUTIONS:
        late, early = _values(now, name), _values(before, name)
        if late != early:
            yield f"{name}: {_listed(early)} before, {_listed(late)} now"


def _values(results: Sequence[Result], name: str) -> list[str]:
    found = (result.document.machine.get(name) for result in results)
    texts = (" ".join(map(str, one)) if isinstance(one, list) else str(one) for one in found)
    return sorted(set(texts) - {"None"})


def _listed(values: Sequence[str]) -> str:
    return " and ".join(values) or "not known"


def _unmatched(late: Sequence[_Figure], early: Sequence[_Figure], pairs: int) -> Iterator[str]:
    gone, new = len(early) - pairs, len(late) - pairs
    if gone or new:
        yield f"{gone} figure(s) are only in the earlier results, {new} only in the later ones"
