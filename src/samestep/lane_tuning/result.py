"""What the lanes cost, and which number of them is recommended. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from samestep.errors import PlanError, TextError
from samestep.lane_tuning.choices import Choice, lanes_of_a_rank
from samestep.words import counted

LIMIT = 1.1
"""The most that a recommended choice costs, relative to the fastest one."""


@dataclass(frozen=True)
class Measured:
    """The steps of one choice in one world."""

    world: int
    lanes: int
    lane_batch: int
    device: str
    parallel: int | None = None
    """Lanes side by side; None: as configured."""
    seconds: tuple[float, ...] = ()
    """Of a step, in each round; on the slowest rank."""
    peak_bytes: int | None = None
    """Memory of the GPU that was in use at most."""
    failed: str = ""
    """Why it could not be measured."""
    notes: tuple[str, ...] = ()
    """What its runs logged about their speed."""

    @property
    def label(self) -> str:
        """As a person says it."""
        return Choice(self.lanes, self.parallel).label

    @property
    def median(self) -> float:
        return median(self.seconds)

    @classmethod
    def read(cls, document: Any) -> Measured:
        """From what another process wrote.

        Raises:
            TextError: if it is something else.
        """
        try:
            lists = {name: tuple(document[name]) for name in ("seconds", "notes")}
            return cls(**{**document, **lists})
        except (TypeError, KeyError):
            raise TextError("does not hold what samestep lanes measured") from None


@dataclass(frozen=True)
class Recommendation:
    """A number of lanes, and why."""

    lanes: int
    parallel: int | None
    cost: float
    """In the world where it costs most."""
    why: str


@dataclass(frozen=True)
class LaneCosts:
    """Everything that was measured."""

    global_batch: int
    now: int
    """The config's own number of lanes."""
    measured: Sequence[Measured]

    def __post_init__(self) -> None:
        if all(one.failed for one in self.measured):
            reasons = "; ".join(f"{one.label}: {one.failed}" for one in self.measured)
            raise PlanError(f"no number of lanes could be measured: {reasons}")

    @property
    def device(self) -> str:
        """What a rank computed on."""
        return self.measured[0].device

    @property
    def worlds(self) -> list[int]:
        """The numbers of ranks."""
        return sorted({one.world for one in self.measured})

    def cost(self, one: Measured) -> float | None:
        """The time of a step, relative to the fastest choice of this world; None if it failed."""
        if one.failed:
            return None
        others = [other for other in self.measured if other.world == one.world and not other.failed]
        return _ratio(one, _fastest(others))

    def recommend(self) -> Recommendation:
        """The most lanes whose cost is at most `LIMIT` in every world that was measured.

        Relative to what can run in all of these worlds: a faster choice that cannot is none.
        """
        costs = self._worst_costs()
        if not costs:
            raise PlanError(
                f"no number of lanes could be measured on {self._shown_worlds}: give more lanes by "
                "--lanes, or fewer --worlds"
            )
        cheap = [choice for choice, cost in costs.items() if cost <= LIMIT]
        least = min(costs, key=costs.__getitem__)
        most = max((choice.lanes for choice in cheap), default=least.lanes)
        widths = [choice for choice in cheap if choice.lanes == most] or [least]
        best = min(widths, key=costs.__getitem__)
        why = self._why(best.lanes, costs[best], bool(cheap))
        return Recommendation(best.lanes, best.parallel, costs[best], why)

    def overlap(self, lanes: int, others: int) -> bool:
        """Whether the times of two numbers of lanes overlap in every world where both were measured."""
        pairs = [
            (one.seconds, other.seconds)
            for one in self.measured
            for other in self.measured
            if (one.lanes, other.lanes, one.world) == (lanes, others, other.world)
            and one.seconds
            and other.seconds
        ]
        return bool(pairs) and all(
            min(first) <= max(second) and min(second) <= max(first) for first, second in pairs
        )

    def _worst_costs(self) -> dict[Choice, float]:
        """Of what runs in all worlds: its cost in the world where that is highest."""
        by_world = {
            world: {Choice(m.lanes, m.parallel): m for m in self.measured if m.world == world}
            for world in self.worlds
        }
        complete: dict[Choice, list[Measured]] = {}
        for choice in dict.fromkeys(Choice(m.lanes, m.parallel) for m in self.measured):
            runs = [found.get(_in_world(choice, world)) for world, found in by_world.items()]
            done = [run for run in runs if run is not None and not run.failed]
            if len(done) == len(runs):
                complete[choice] = done
        fastest = [_fastest(runs) for runs in zip(*complete.values(), strict=True)]
        return {
            choice: max(_ratio(run, base) for run, base in zip(runs, fastest, strict=True))
            for choice, runs in complete.items()
        }

    def _why(self, lanes: int, cost: float, is_cheap: bool) -> str:
        allows = f"and the run can use any number of ranks up to {lanes}"
        if lanes == 1:
            allows = "but the run can use one rank only: the table shows what more lanes cost"
        several = len(self.worlds) > 1
        where = f" that runs on {self._shown_worlds}" if several else ""
        if is_cheap:
            return (
                f"it is the most whose steps take at most {LIMIT:g} times those of the fastest "
                f"choice{where} ({cost:.2f}), {allows}"
            )
        return (
            f"no choice takes at most {LIMIT:g} times the fastest one's time on each of "
            f"{self._shown_worlds}, and this one comes nearest ({cost:.2f}), {allows}"
        )

    @property
    def _shown_worlds(self) -> str:
        *first, last = map(str, self.worlds)
        return f"{', '.join(first)} and {last} ranks" if first else f"{counted(last, 'rank')}"

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "global_batch": self.global_batch,
            "device": self.device,
            "now": self.now,
            "limit": LIMIT,
            "recommended": asdict(self.recommend()),
            "measured": [self._row(one) for one in self.measured],
        }

    def _row(self, one: Measured) -> dict[str, Any]:
        times = [1e3 * seconds for seconds in one.seconds]
        return {
            "world": one.world,
            "lanes": one.lanes,
            "lane_batch": one.lane_batch,
            "parallel": one.parallel,
            "ms": median(times) if times else None,
            "ms_of_rounds": times,
            "cost": self.cost(one),
            "peak_bytes": one.peak_bytes,
            "most_ranks": one.lanes,
            "failed": one.failed or None,
            "notes": list(one.notes),
        }


def _fastest(several: Sequence[Measured]) -> Measured:
    return min(several, key=lambda one: one.median)


def _ratio(one: Measured, base: Measured) -> float:
    """The median of the rounds' ratios: what disturbs the machine disturbs a whole round."""
    return median(a / b for a, b in zip(one.seconds, base.seconds, strict=True))


def _in_world(choice: Choice, world: int) -> Choice:
    """What this choice is in another world, where a rank may have fewer lanes than its width."""
    if choice.parallel is None:
        return choice
    return replace(choice, parallel=min(choice.parallel, lanes_of_a_rank(choice.lanes, world)))
