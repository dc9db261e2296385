"""Settings of `samestep bench scaling`: workloads, sizes, and how a batch grows with the ranks. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from samestep.config import Config, load_config
from samestep.errors import PlanError
from samestep.lanes.plan import BatchPlan

KIND = "scaling"
WORKLOADS = ("mlp", "conv", "transformer")
SIZES = ("small", "medium", "large")
WEAK, STRONG = "weak", "strong"
MODES = {WEAK: (WEAK,), STRONG: (STRONG,), "both": (WEAK, STRONG)}
SAMESTEP, DDP = "samestep", "ddp"
PHASES = ("data", "compute", "exchange", "update", "wait")
"""Phases of a step, from the bottom of a bar up."""
VARIANTS = (SAMESTEP, DDP)
_STRONG_LANES = 8
"""Lanes of a built-in workload, unless there are more ranks."""


_BUILT_IN = f"{Path(__file__).resolve().with_name('workloads.py')}:NamedWorkload"


def builtin_config() -> Config:
    """Return a small training to measure where no config is given; it has BatchNorm."""
    batch = 128
    params = {"workload": "conv", "size": "small", "global_batch": batch}
    return load_config({
        "name": "built-in", "task": _BUILT_IN, "params": params, "global_batch": batch, "lanes": 1, "steps": 1,
    })  # fmt: skip


def is_builtin(config: Config) -> bool:
    """Return whether it trains what is built in."""
    return config.task == _BUILT_IN


_ROUNDS, _QUICK_ROUNDS = 9, 3
_SECONDS, _QUICK_SECONDS = 0.4, 0.1
_STEPS, _QUICK_STEPS = 24, 12


@dataclass(frozen=True)
class ScalingRequest:
    """A measurement of scaling."""

    mode: str = "both"
    """`weak`, `strong` or `both`."""
    workload: str | None = "mlp"
    """A built-in task; None for the config's."""
    size: str = "small"
    """Size of the built-in task."""
    lanes: int | None = None
    """Lanes per rank in weak scaling, of all ranks in strong scaling; None to choose."""
    variants: tuple[str, ...] = ()
    """Besides samestep; empty for all."""
    rounds: int | None = None
    quick: bool = False
    most_ranks: int = 1
    """Largest of the world sizes that are measured: so many lanes there must be in strong scaling."""

    def check(self, config: Config) -> None:
        """Refuse what cannot be measured."""
        for option, value, known in (
            ("mode", self.mode, MODES),
            ("size", self.size, SIZES),
            ("workload", self.workload or WORKLOADS[0], WORKLOADS),
        ):
            if value not in known:
                raise PlanError(f"{option} is {value!r}: there are {', '.join(known)}")
        unknown = [name for name in self.variants if name not in VARIANTS]
        if unknown:
            raise PlanError(f"--variants has {', '.join(unknown)}: there are {', '.join(VARIANTS)}")
        if self.workload is None and config.task is None:
            raise PlanError("the config names no task: set task: FILE.py:Class, or give --workload")
        # A lane's samples of a built-in task are not known without torch, and matter for nothing here.
        if STRONG in MODES[self.mode]:
            self.plan(config, 1, STRONG, self.most_ranks)

    def plan(self, config: Config, lane_batch: int, mode: str, world: int) -> BatchPlan:
        """Return what a number of ranks trains on: in weak scaling so many times what one rank does.

        Args:
            lane_batch: Samples of a lane of a built-in task, the same at any number of lanes.

        Raises:
            PlanError: if there are fewer lanes than ranks.
        """
        if self.workload is None:
            own = config.batch_plan(1)
            batch, lanes = own.global_batch, self.lanes or own.lane_count
        else:
            lanes = self.lanes or (1 if mode == WEAK else max(_STRONG_LANES, self.most_ranks))
            batch = lane_batch * lanes
        if mode == WEAK:
            return BatchPlan(world * batch, world * lanes)
        if lanes < world:
            raise PlanError(
                f"{world} ranks need {world} lanes or more, and in strong scaling there are "
                f"{lanes} for all ranks: give --lanes {world}, or --mode weak"
            )
        return BatchPlan(batch, lanes)

    @property
    def running(self) -> tuple[str, ...]:
        """The loops that are measured; samestep's is first."""
        chosen = self.variants or VARIANTS
        return (SAMESTEP, *(name for name in VARIANTS if name in chosen and name != SAMESTEP))

    @property
    def turns(self) -> int:
        """Return the number of turns of each loop."""
        return self.rounds or (_QUICK_ROUNDS if self.quick else _ROUNDS)

    @property
    def turn_seconds(self) -> float:
        """Return what a turn's steps take together, about."""
        return _QUICK_SECONDS if self.quick else _SECONDS

    @property
    def instrumented(self) -> int:
        """Steps whose phases are timed."""
        return _QUICK_STEPS if self.quick else _STEPS

    def options(self) -> tuple[str, ...]:
        """Return the options of a rank's command line."""
        found = ["--mode", self.mode, "--size", self.size, "--rounds", str(self.turns)]
        found += ["--variants", ",".join(self.running), "--most-ranks", str(self.most_ranks)]
        found += [] if self.workload is None else ["--workload", self.workload]
        found += [] if self.lanes is None else ["--lanes", str(self.lanes)]
        return (*found, *(["--quick"] if self.quick else []))


def parse_variants(text: str) -> tuple[str, ...]:
    """Names such as `samestep,ddp`, from the command line."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
