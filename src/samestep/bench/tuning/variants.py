"""Variants of a config: ranks and threads, lanes, and other settings. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from samestep.config import Config
from samestep.errors import PlanError, TextError
from samestep.lanes.plan import BatchPlan
from samestep.parsing.json_text import parse_json
from samestep.words import counted

BASE = "as configured"
USUAL_LANES = (1, 2, 4, 8, 16)
"""The numbers of lanes that are compared unless others are given."""


@dataclass(frozen=True)
class Variant:
    """The config with some other values."""

    label: str
    overrides: tuple[str, ...] = ()

    def has(self, key: str) -> bool:
        """Return whether it has another value of a key."""
        return any(override.startswith(f"{key}=") for override in self.overrides)


@dataclass(frozen=True)
class Layout:
    """Ranks of one machine, and the threads of each."""

    ranks: int
    threads: int | None
    """None: as configured."""

    @property
    def label(self) -> str:
        """Return it in words."""
        ranks = counted(self.ranks, "rank")
        return ranks if self.threads is None else f"{ranks} x {counted(self.threads, 'thread')}"

    @property
    def overrides(self) -> tuple[str, ...]:
        """Return what the config needs for it."""
        if self.threads is None:
            return ()
        return (f"distributed.threads_per_rank={self.threads}",)


def layouts(config: Config, cpus: int, gpus: int, quick: bool) -> list[Layout]:
    """Return all cores by threads, by ranks, and ways between; and one thread alone, which is the default.

    Raises:
        PlanError: the config has no global batch, so that other ranks would do other work.
    """
    if config.global_batch is None:
        raise PlanError(
            "tune compares the same step on several numbers of ranks, and the config has no "
            "global_batch: set it in place of batch_per_rank"
        )
    lanes = config.lane_count(1)
    found = _powers(min(gpus or cpus, lanes))
    counts = [ranks for ranks in found if config.global_batch % ranks == 0]
    if gpus:
        return [Layout(ranks, None) for ranks in counts]
    if quick:
        counts = sorted({counts[0], counts[-1]})
    ways = [Layout(1, 1), *(Layout(ranks, cpus // ranks) for ranks in counts)]
    return list(dict.fromkeys(ways))


def _powers(most: int) -> list[int]:
    """1, 2, 4... and the largest possible."""
    found = [1]
    while 2 * found[-1] <= most:
        found.append(2 * found[-1])
    return sorted({*found, most})


def variants(config: Config, world: int, cpus: int, on_gpu: bool, quick: bool) -> list[Variant]:
    """Other lanes, loader workers, precision and, on GPUs, no graphs; the config itself comes first."""
    found = [Variant(BASE)]
    own = config.lane_count(world)
    found += lane_variants(_other_lanes(config, world, own, quick), (), world)
    workers = [0, 1] if quick else [0, 1, 2, 4]
    found += [
        Variant(counted(count, "worker"), (f"loader.workers={count}",))
        for count in workers
        if count != config.loader.workers and count <= max(1, cpus)
    ]
    other = "fp32" if config.precision == "bf16" else "bf16"
    found.append(Variant(other, (f"precision={other}",)))
    if on_gpu and config.speed.graph is not False:
        found.append(Variant("without graphs", ("speed.graph=false",)))
    return found


def batches(config: Config, quick: bool) -> list[Variant]:
    """Larger global batches, the smallest first."""
    assert config.global_batch is not None, "`layouts` has refused it"
    larger = [config.global_batch * factor for factor in ((2,) if quick else (2, 4))]
    return [Variant(f"global batch {n}", (f"global_batch={n}",)) for n in larger]


def lanes_to_compare(config: Config, wanted: Sequence[int] = (), worlds: Sequence[int] = (1,)) -> tuple[int, ...]:
    """Return the numbers of lanes that cut this config's global batch and give some world a lane per rank.

    Args:
        wanted: Chosen by the user; each must be possible. By default the usual ones that are
            possible, and the config's own.

    Raises:
        PlanError: if that leaves none, or none for one of the worlds.
    """
    if config.batch_per_rank is not None:
        raise PlanError(
            f"batch_per_rank is {config.batch_per_rank}: the lanes then follow from the ranks and "
            "accumulation, and there is nothing to choose. Set global_batch instead"
        )
    own = config.batch_plan(1)
    for lanes in wanted:
        BatchPlan(own.global_batch, lanes)  # which says what is wrong with it
    usual = sorted({*USUAL_LANES, own.lane_count})
    found = tuple(wanted) or tuple(n for n in usual if own.global_batch % n == 0)
    for world in worlds:
        if found[-1] < world:
            tried = ", ".join(map(str, found))
            raise PlanError(
                f"{world} ranks need {world} lanes or more, and the numbers of lanes to compare are "
                f"{tried}, for a global_batch of {own.global_batch}: give others by --lanes"
            )
    too_few = [lanes for lanes in wanted if lanes < min(worlds)]
    if too_few:
        raise PlanError(
            f"--lanes has {too_few[0]}, but every rank drives at least one lane, and the ranks are "
            f"{min(worlds)} or more: leave it out, or measure with fewer ranks"
        )
    return tuple(lanes for lanes in found if lanes >= min(worlds))


def lane_variants(lanes: Sequence[int], widths: Sequence[int], world: int) -> list[Variant]:
    """Return a variant for each number of lanes that gives every rank one.

    Args:
        widths: Lanes side by side in a CUDA graph; none: as configured.
    """
    possible = [count for count in lanes if count >= world]
    if not widths:
        return [Variant(counted(count, "lane"), (f"lanes={count}",)) for count in possible]
    # By the width of one rank, as at any number of them; a rank has no more than its lanes.
    at_once = dict.fromkeys((count, min(width, count)) for count in possible for width in widths)
    return [
        Variant(
            f"{counted(count, 'lane')}, {width} at once",
            (f"lanes={count}", f"speed.parallel_lanes={min(width, -(-count // world))}"),
        )
        for count, width in at_once
    ]


def _other_lanes(config: Config, world: int, own: int, quick: bool) -> Sequence[int]:
    try:
        possible = lanes_to_compare(config, worlds=[world])
    except PlanError:
        return ()  # `lanes_fixed` says why
    others = [count for count in possible if count != own]
    return sorted({others[0], others[-1]}) if quick and others else others


def lanes_fixed(config: Config, world: int) -> str:
    """Return why there is no choice of lanes; empty if there is."""
    try:
        lanes_to_compare(config, worlds=[world])
    except PlanError as error:
        return str(error)
    return ""


def as_text(tried: Sequence[Variant]) -> str:
    """Return it for the command line of ranks."""
    return json.dumps([asdict(one) for one in tried])


def from_text(text: str) -> list[Variant]:
    """Return what `as_text` made."""
    try:
        return [Variant(one["label"], tuple(one["overrides"])) for one in parse_json(text)]
    except (TypeError, KeyError):
        raise TextError(f"--variants holds no variants: {text[:100]!r}") from None
