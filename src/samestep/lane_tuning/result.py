"""What the lanes cost, and which number of them is recommended. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from samestep.errors import PlanError, TextError
from samestep.lane_tuning.choices import Choice, lanes_of_a_rank

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
        """The time of a step, relative to the fastest choice of this world; None if it failed.

        The median of the rounds' ratios: what disturbs the machine for a while disturbs all
        choices of a round.
        """
        if one.failed:
            return None
        timed = [other for other in self.measured if other.world == one.world and not other.failed]
        fastest = min(timed, key=lambda other: other.median)
        return median(a / b for a, b in zip(one.seconds, fastest.seconds, strict=True))

    def recommend(self) -> Recommendation:
        """The most lanes whose cost is at most `LIMIT` in every world that was measured."""
        costs = self._worst_costs()
        if not costs:
            raise PlanError(
                f"no number of lanes could be measured at all of {self.worlds} ranks: give more lanes "
                "by --lanes, or fewer --worlds"
            )
        cheap = [choice for choice, cost in costs.items() if cost <= LIMIT]
        least = min(costs, key=costs.__getitem__)
        most = max((lanes for lanes, _ in cheap), default=least[0])
        widths = [choice for choice in cheap if choice[0] == most] or [least]
        lanes, parallel = min(widths, key=costs.__getitem__)
        cost = costs[lanes, parallel]
        return Recommendation(lanes, parallel, cost, _why(lanes, cost, bool(cheap)))

    def _worst_costs(self) -> dict[tuple[int, int | None], float]:
        """Of each number of lanes and width: its cost in the world where that is highest."""
        by_key = {(m.world, m.lanes, m.parallel): self.cost(m) for m in self.measured}
        found = {}
        for one in self.measured:
            costs = [by_key.get((world, one.lanes, _width(one, world))) for world in self.worlds]
            known = [cost for cost in costs if cost is not None]
            if len(known) == len(costs):
                found[one.lanes, one.parallel] = max(known)
        return found

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


def _width(one: Measured, world: int) -> int | None:
    """A choice's width in another world, where a rank may have fewer lanes than that."""
    if one.parallel is None:
        return None
    return min(one.parallel, lanes_of_a_rank(one.lanes, world))


def _why(lanes: int, cost: float, is_cheap: bool) -> str:
    allows = f"and the run can use any number of ranks up to {lanes}"
    if lanes == 1:
        allows = "but the run can use one rank only: the table shows what more cost"
    if is_cheap:
        return (
            f"it is the most whose steps take at most {LIMIT:g} times the fastest choice's "
            f"({cost:.2f}), {allows}"
        )
    return (
        f"no choice takes at most {LIMIT:g} times the fastest one's time at every number of ranks, and "
        f"this one comes nearest ({cost:.2f}), {allows}"
    )
