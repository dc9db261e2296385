"""Rows of worlds that were not measured: predicted from smaller ones, or simulated for a given link. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from samestep.bench.scaling_figures import with_efficiency
from samestep.bench.scaling_plan import SAMESTEP, STRONG, WEAK
from samestep.bench.statistics import Link, Spread
from samestep.bench.step_advice import Advice, advise, parse_link
from samestep.bench.step_model import Row, fit_step, lane_seconds, lanes_of_rank
from samestep.errors import PlanError
from samestep.lane_tuning.choices import parse_counts

SIMULATED_WORLDS = (8, 64, 512)
"""Which are simulated for a link unless others are given."""


@dataclass(frozen=True)
class Forecast:
    """What is wanted besides what is measured."""

    worlds: tuple[int, ...] = ()
    validate: bool = False
    link: Link | None = None
    link_text: str = ""

    @classmethod
    def of(cls, predict: str, validate: bool, link: str, measured: Sequence[int]) -> Forecast:
        """From the command line.

        Args:
            predict: Numbers of ranks.
            validate: Whether predictions are compared with what is measured.
            link: A link, to simulate ranks over it.
            measured: The worlds that are measured; none if this is a rank of another launcher.

        Raises:
            PlanError: if they mean nothing together.
        """
        worlds = parse_counts(predict, "--predict") if predict else ()
        if validate and link:
            raise PlanError("--validate compares predictions, and --link simulates: leave out one")
        if validate and not worlds:
            raise PlanError("--validate compares predictions: add --predict, such as --predict 4")
        if worlds and not link:
            if not any(world > 1 for world in set(measured) - set(worlds)):
                raise PlanError(
                    "--predict needs a world of two ranks or more to predict from: add --worlds 1,2, or give a "
                    "link by --link"
                )
            refuse_wrong_validation(worlds, measured, validate)
        return cls(worlds, validate, parse_link(link) if link else None, link)

    def add_to(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """What was measured, with its efficiency, and then what is predicted or simulated."""
        if self.link is not None:
            worlds = self.worlds or SIMULATED_WORLDS
            return [
                *with_efficiency(rows),
                *simulated_rows(rows, worlds, self.link, self.link_text),
            ]
        return with_efficiency([*rows, *predicted_rows(rows, self.worlds, self.validate)])


def refuse_wrong_validation(worlds: Sequence[int], measured: Iterable[int], validate: bool) -> None:
    """Refuse predictions of measured worlds that are not to be compared, and the other way round.

    Raises:
        PlanError: if so.
    """
    both = sorted(set(measured) & set(worlds))
    if both and not validate:
        raise PlanError(
            f"--predict has {both[0]}, which is measured: leave it out, or add --validate to compare them"
        )
    if validate and not both:
        raise PlanError(
            "--validate compares predictions with measured worlds, and --predict has none of those of --worlds"
        )


def predicted_rows(
    rows: Sequence[Row], worlds: Sequence[int], validate: bool
) -> list[dict[str, Any]]:
    """A row of each mode and world, predicted from the other worlds that were measured.

    Args:
        rows: What was measured.
        worlds: The numbers of ranks to predict.
        validate: Whether a world that was measured too is compared with its prediction, which is then made
            without it.

    Raises:
        PlanError: if nothing can be predicted from these, or nothing compared.
    """
    ours = [row for row in rows if row["contestant"] == SAMESTEP and not row["predicted"]]
    if not worlds:
        return []
    refuse_wrong_validation(worlds, (row["world"] for row in ours), validate)
    found = []
    for mode in dict.fromkeys(row["mode"] for row in ours):
        of_mode = [row for row in ours if row["mode"] == mode]
        known = [row for row in of_mode if row["world"] not in worlds]
        model = fit_step(known)
        for world in worlds:
            lanes = _lanes(known[0], world)
            if lanes is None:
                continue
            mine = lanes_of_rank(lanes, world)
            parts = model.phases(world, mine)
            row = _row(known[0], world, lanes, model.step(world, mine), parts)
            row["predicted_from"] = sorted(one["world"] for one in known if not one["shares_cores"])
            found.append(row | _compared(row, of_mode, world))
    return found


def simulated_rows(
    rows: Sequence[Row], worlds: Sequence[int], link: Link, text: str
) -> list[dict[str, Any]]:
    """A row of each world over a given link, with the lanes and buckets that would suit it.

    Args:
        rows: What was measured.
        worlds: The numbers of ranks to simulate.
        link: A message between two ranks.
        text: The link as it was given.

    Raises:
        PlanError: if no measured rank had a core of its own.
    """
    ours = [row for row in rows if row["contestant"] == SAMESTEP and not row["predicted"]]
    usable = sorted((row for row in ours if not row["shares_cores"]), key=lambda row: row["world"])
    if not usable:
        raise PlanError("all measured ranks shared cores: measure fewer with --worlds")
    base = next((row for row in usable if row["mode"] == WEAK), usable[0])
    lane, update = lane_seconds(base).median, base["phases"]["update"]["median"]
    found = []
    for world in worlds:
        advice = advise(link, world, lane, update, base["gradient_bytes"])
        lanes = world * advice.lanes_of_rank
        row = _row({**base, "mode": WEAK}, world, lanes, advice.step, {"exchange": advice.exposed})
        efficiency = asdict(advice.efficiency)
        row |= {"simulated": text, "advice": _advice(advice), "efficiency": efficiency}
        found.append(row)
    return found


def _advice(advice: Advice) -> dict[str, Any]:
    return {
        "lanes_of_rank": advice.lanes_of_rank,
        "bucket_bytes": advice.bucket_bytes,
        "exchange": advice.exchange,
        "reaches_goal": advice.reaches_goal,
    }


def _lanes(known: Row, world: int) -> int | None:
    """The lanes of a world; None if in strong scaling there are fewer than ranks."""
    if known["mode"] == STRONG:
        return int(known["lanes"]) if known["lanes"] >= world else None
    return world * int(known["lanes"]) // int(known["world"])


def _row(
    base: Row, world: int, lanes: int, step: Spread, phases: dict[str, Spread]
) -> dict[str, Any]:
    per_lane = base["global_batch"] // base["lanes"]
    names = ("mode", "workload", "contestant", "precision", "backend", "gradient_bytes")
    return {
        **{name: base[name] for name in names},
        "world": world,
        "lanes": lanes,
        "global_batch": per_lane * lanes,
        **asdict(step),
        "samples_per_second": per_lane * lanes / step.median,
        "efficiency": None,
        "ratio_to_ddp": None,
        "phases": {name: asdict(part) for name, part in phases.items()},
        "ranks": [],
        "slow_ranks": [],
        "control": None,
        "left_out": {},
        "link": None,
        "shares_cores": False,
        "predicted": True,
        "simulated": None,
    }


def _compared(row: Row, measured: Sequence[Row], world: int) -> dict[str, Any]:
    """How far a prediction is from what was measured, if it was and can be compared."""
    real = next((one for one in measured if one["world"] == world), None)
    if real is None:
        return {}
    if real["shares_cores"]:
        return {
            "incomparable": f"its {world} ranks shared cores, and the prediction is of ranks with cores of their own"
        }
    return {
        "measured": real["median"],
        "error": row["median"] / real["median"] - 1,
        "inside": row["low"] <= real["median"] <= row["high"],
    }
