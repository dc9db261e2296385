"""What is tried: ranks and threads, then other settings on the best of them. No torch here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from samestep.config import Config
from samestep.errors import PlanError, TextError
from samestep.foreign.json_text import parse_json
from samestep.lane_tuning.choices import lanes_to_compare

BASE = "as configured"


@dataclass(frozen=True)
class Variant:
    """The config with some other values."""

    label: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Ranks of one machine, and the threads of each."""

    ranks: int
    threads: int | None
    """None: as configured."""

    @property
    def label(self) -> str:
        """As a person says it."""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        if self.threads is None:
            return ranks
        return f"{ranks} x {self.threads} thread{'s' if self.threads > 1 else ''}"

    @property
    def overrides(self) -> tuple[str, ...]:
        """What the config needs for it."""
        if self.threads is None:
            return ()
        return (f"distributed.threads_per_rank={self.threads}",)


def layouts(config: Config, cpus: int, gpus: int, quick: bool) -> list[Layout]:
    """All cores by threads, by ranks, and ways between; and one thread alone, which is the default.

    Args:
        config: The training's config: every rank needs a lane.
        cpus: Cores that the ranks share.
        gpus: GPUs here; with some, a rank drives one each.
        quick: Whether only the extremes are tried.

    Raises:
        PlanError: the config has no global batch, so that other ranks would do other work.
    """
    if config.global_batch is None:
        raise PlanError(
            "advise compares the same step on several numbers of ranks, and the config has no "
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
    """Other lanes, loader workers, precision and, on GPUs, no graphs; the config itself comes first.

    Args:
        config: The training's config.
        world: The number of ranks that they are tried on.
        cpus: Cores that the ranks share.
        on_gpu: Whether ranks compute on GPUs.
        quick: Whether fewer are tried.
    """
    found = [Variant(BASE)]
    own = config.lane_count(world)
    found += [Variant(_lanes(n), (f"lanes={n}",)) for n in _other_lanes(config, world, own, quick)]
    workers = [0, 1] if quick else [0, 1, 2, 4]
    found += [
        Variant(_workers(count), (f"loader.workers={count}",))
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


def _other_lanes(config: Config, world: int, own: int, quick: bool) -> Sequence[int]:
    try:
        possible = lanes_to_compare(config, worlds=[world])
    except PlanError:
        return ()  # `lanes_fixed` says why
    others = [count for count in possible if count != own]
    return sorted({others[0], others[-1]}) if quick and others else others


def lanes_fixed(config: Config, world: int) -> str:
    """Why there is no choice of lanes; empty if there is."""
    try:
        lanes_to_compare(config, worlds=[world])
    except PlanError as error:
        return str(error)
    return ""


def _lanes(count: int) -> str:
    return "1 lane" if count == 1 else f"{count} lanes"


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def as_text(tried: Sequence[Variant]) -> str:
    """For the command line of ranks."""
    return json.dumps([asdict(one) for one in tried])


def from_text(text: str) -> list[Variant]:
    """What `as_text` made.

    Raises:
        TextError: for anything else.
    """
    try:
        return [Variant(one["label"], tuple(one["overrides"])) for one in parse_json(text)]
    except (TypeError, KeyError):
        raise TextError(f"--variants holds no variants: {text[:100]!r}") from None
