"""`samestep bench scaling` for programs. No torch here: the ranks are processes of their own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samestep.bench.document import Document
from samestep.bench.kinds import joined
from samestep.bench.scaling_plan import SAMESTEP, STRONG, WEAK, ScalingRequest
from samestep.bench.worlds import BenchCommand, measure_worlds
from samestep.config import Config, load_config
from samestep.environment.hardware import owned_cpus
from samestep.environment.launch import detect_launch
from samestep.environment.variables import process_environment
from samestep.launch.run.worlds import World, refuse_fixed_world

_LOGGER = logging.getLogger("samestep")


def benchmark_weak_scaling(
    config: str | Path | None = None,
    worlds: Sequence[int] = (1, 2),
    *,
    overrides: Sequence[str] = (),
    workload: str = "mlp",
    size: str = "small",
    lanes: int | None = None,
    variants: Sequence[str] = (),
    rounds: int | None = None,
    quick: bool = False,
) -> dict[int, dict[str, Any]]:
    """Measure what a step takes when the global batch grows with the ranks, on ranks of this machine.

    Args:
        config: The file of a training, whose global batch is that of one rank; None for a built-in task.
        worlds: Numbers of ranks.
        overrides: Values that replace the config's, as `section.key=value`.
        workload: The built-in task, without a config: `mlp`, `conv` or `transformer`.
        size: Of the built-in task: `small`, `medium` or `large`.
        lanes: Of a rank; None for the config's, or one.
        variants: Of `samestep` and `ddp`; both, if empty.
        rounds: Turns of each loop.
        quick: Fewer and shorter turns, of samestep and DDP.

    Returns:
        For each number of ranks: a step's `median`, `low` and `high` in seconds, `samples_per_second`,
        `efficiency`, `ratio_to_ddp`, `phases` and `ranks` of samestep, and the same of other loops by name in
        `others`; as in the JSON of `samestep bench scaling`.

    Example:
        found = samestep.benchmark_weak_scaling("config.yaml", worlds=(1, 2, 4))
        assert found[4]["efficiency"]["median"] > 0.9
    """
    options = {"size": size, "lanes": lanes, "rounds": rounds, "quick": quick}
    return _measure(WEAK, config, worlds, overrides, workload, variants, **options)


def benchmark_strong_scaling(
    config: str | Path | None = None, worlds: Sequence[int] = (1, 2), **options: Any
) -> dict[int, dict[str, Any]]:
    """Measure what a step takes when the global batch stays, on more and more ranks of this machine.

    Takes the options of `benchmark_weak_scaling`, and returns as it does; `lanes` are those of all ranks.
    """
    return _measure(STRONG, config, worlds, **options)


def threads_of_ranks(request: ScalingRequest, config: Config) -> list[str]:
    """Return overrides that give the ranks of every world as many threads.

    Raises:
        LaunchError: if this is a rank already, or the config is for one number of ranks.
    """
    environ = process_environment()
    refuse_fixed_world(config, detect_launch(environ).world)
    if config.same == "bits" or config.distributed.threads_per_rank != "auto":
        return []
    # Else a single rank would have all cores, and more ranks could bring nothing.
    each = max(1, owned_cpus(environ).value // request.most_ranks)
    return [f"distributed.threads_per_rank={each}"]


def _measure(
    mode: str,
    config: str | Path | None,
    worlds: Sequence[int],
    overrides: Sequence[str] = (),
    workload: str = "mlp",
    variants: Sequence[str] = (),
    **options: Any,
) -> dict[int, dict[str, Any]]:
    built_in, most = None if config else workload, max(worlds, default=1)
    request = ScalingRequest(mode, built_in, variants=tuple(variants), most_ranks=most, **options)
    file = None if config is None else Path(config)
    loaded = Config(name="bench", steps=1) if file is None else load_config(file, overrides)
    request.check(loaded)
    changed = (*overrides, *threads_of_ranks(request, loaded))
    ranks = BenchCommand("bench scaling", loaded, file, changed, request.options())
    documents = measure_worlds(ranks, [World(world) for world in worlds], _LOGGER.info)
    return by_world(documents)


def by_world(documents: Sequence[Document]) -> dict[int, dict[str, Any]]:
    """Return the rows of one mode, by their numbers of ranks."""
    rows = joined(documents).rows
    return {
        row["world"]: {
            **row,
            "others": {
                other["variant"]: other
                for other in rows
                if other["world"] == row["world"] and other["variant"] != SAMESTEP
            },
        }
        for row in rows
        if row["variant"] == SAMESTEP
    }
