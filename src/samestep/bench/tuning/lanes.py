"""The cost of each number of lanes, and the recommended one. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import Any

from samestep.bench.presentation import Presentation, Table
from samestep.bench.statistics import WORTH, ratio_of, spread_of
from samestep.bench.tuning.timed import Timed, is_faster
from samestep.errors import PlanError
from samestep.report.chart import COLORS, Line, Panel
from samestep.report.format import format_bytes, format_seconds
from samestep.words import counted

_COLUMNS = ("choice", "ranks", "samples per lane", "a step", "95 % range", "relative", "GPU memory", "note")


@dataclass(frozen=True)
class Recommendation:
    """A number of lanes, and why."""

    label: str
    lanes: int
    cost: float
    """Relative to the fastest choice, at the number of ranks where it costs most."""
    why: str


class LaneCosts:
    """Steps of one global batch, timed with several numbers of lanes."""

    def __init__(self, now: int, measured: Sequence[Timed], on_gpu: bool = False) -> None:
        """Args:
            measured: A choice has one label at all numbers of ranks.

        Raises:
            PlanError: None could be measured.
        """
        self._now, self.measured, self._on_gpu = now, measured, on_gpu
        self._worlds = sorted({one.world for one in measured})
        self._done = [one for one in measured if not one.failed]
        if not self._done:
            reasons = "; ".join(f"{one.label}: {one.failed}" for one in measured)
            raise PlanError(f"no number of lanes could be measured: {reasons}")

    def cost(self, one: Timed) -> float | None:
        """Return the time of a step relative to the fastest choice on as many ranks; None if it failed."""
        if one.failed:
            return None
        return ratio_of(_fastest(o for o in self._done if o.world == one.world).seconds, one.seconds).median

    @cached_property
    def best(self) -> Recommendation:
        """The most lanes that no choice is clearly faster than, at any number of ranks that was measured.

        Raises:
            PlanError: No choice runs at all of these numbers of ranks.
        """
        choices = self._everywhere()
        if not choices:
            raise PlanError(
                f"no number of lanes could be measured on {self._shown_worlds}: give more lanes by --lanes, or "
                "fewer --worlds"
            )
        # A faster choice that cannot run at all of these sizes is none.
        fastest = [_fastest(runs) for runs in zip(*choices.values(), strict=True)]
        costs = {
            label: max(ratio_of(base.seconds, run.seconds).median for run, base in zip(runs, fastest, strict=True))
            for label, runs in choices.items()
        }
        good = [
            label
            for label, runs in choices.items()
            if not any(is_faster(base, run) for run, base in zip(runs, fastest, strict=True))
        ]
        most = max((choices[label][0].lanes for label in good), default=None)
        equal = [label for label in good if choices[label][0].lanes == most] or list(choices)
        label = min(equal, key=costs.__getitem__)
        lanes = choices[label][0].lanes
        return Recommendation(label, lanes, costs[label], self._why(lanes, costs[label], bool(good)))

    def _everywhere(self) -> dict[str, list[Timed]]:
        """Return the choices that run at all numbers of ranks, in the order of these."""
        found: dict[str, list[Timed]] = {}
        for one in sorted(self._done, key=lambda one: one.world):
            found.setdefault(one.label, []).append(one)
        return {label: runs for label, runs in found.items() if len(runs) == len(self._worlds)}

    def _why(self, lanes: int, cost: float, is_good: bool) -> str:
        allows = f"and the run can use any number of ranks up to {lanes}"
        if lanes == 1:
            allows = "but the run can use one rank only: the table shows what more lanes cost"
        where = f" on {self._shown_worlds}" if len(self._worlds) > 1 else ""
        if is_good:
            return f"no other choice is {WORTH:g} times as fast{where} ({cost:.2f} of the fastest), {allows}"
        return f"no choice is among the fastest on each of {self._shown_worlds}, and this one comes nearest ({cost:.2f}), {allows}"

    @property
    def _shown_worlds(self) -> str:
        *first, last = map(str, self._worlds)
        return f"{', '.join(first)} and {last} ranks" if first else counted(last, "rank")

    @property
    def conclusion(self) -> str:
        """The recommendation with its reason, and whether the config has it."""
        text = f"Recommended: {self.best.label}: {self.best.why}."
        if self.best.lanes == self._now:
            return f"{text} The config has it."
        return f"{text} The config has {self._now}; other lanes are another run."

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        rows = [{**asdict(one), "cost": self.cost(one)} for one in self.measured]
        return {"now": self._now, "recommended": asdict(self.best), "measured": rows}

    def present(self, title: str, device: str) -> Presentation:
        """Return the table and the plot."""
        rounds, batch = max(len(one.seconds) for one in self._done), self._done[0].global_batch
        return Presentation(
            title=title,
            heading=f"global batch {batch} on {device}; medians of {counted(rounds, 'round')}",
            panels=[self._panel()],
            tables=[Table("What lanes cost", _COLUMNS, [self._cells(one) for one in self.measured])],
            verdicts=[self.conclusion, *self._remarks()],
        )

    def _cells(self, one: Timed) -> tuple[str, ...]:
        cost = self.cost(one)
        if cost is None:
            return (one.label, str(one.world), *["-"] * 5, "left out")
        spread = spread_of(one.seconds)
        # A process's own memory never shrinks: of interleaved choices it says nothing.
        memory = format_bytes(one.peak_bytes) if self._on_gpu and one.peak_bytes else "-"
        return (
            one.label,
            str(one.world),
            str(one.global_batch // one.lanes),
            format_seconds(spread.median),
            f"{format_seconds(spread.low)} - {format_seconds(spread.high)}",
            f"{cost:.2f}",
            memory,
            "recommended" if one.label == self.best.label else "",
        )

    def _remarks(self) -> list[str]:
        """Return why choices are left out, and what their runs logged about their speed."""
        failed = [f"{one.label}: left out: {one.failed}" for one in self.measured if one.failed]
        return failed + [f"{one.label}: {note}" for one in self._done for note in one.notes]

    def _panel(self) -> Panel:
        lines = []
        for number, world in enumerate(self._worlds):
            found = [one for one in self._done if one.world == world]
            name = counted(world, "rank")
            ranges = [ratio_of(_fastest(found).seconds, one.seconds) for one in found]
            lines.append(
                Line(
                    name=name, group=name, x=[one.lanes for one in found],
                    y=[self.cost(one) for one in found], color=COLORS[number % len(COLORS)],
                    mark="circle", text=[f"{one.label}: {one.shown}" for one in found],
                    low=[one.low for one in ranges], high=[one.high for one in ranges],
                )
            )  # fmt: skip
        ticks = sorted({one.lanes for one in self._done})
        return Panel(
            title="what lanes cost", lines=lines, x="lanes", y="time of a step, relative", xlog=True,
            xticks=ticks, zero=True, height=440,
        )  # fmt: skip


def _fastest(several: Iterable[Timed]) -> Timed:
    return min(several, key=lambda one: median(one.seconds))
