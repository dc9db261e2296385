"""Starts ranks on this machine for each number of them, and reads what they measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from samestep.config import override_config
from samestep.foreign.json_text import read_json
from samestep.lane_tuning.choices import Comparison
from samestep.lane_tuning.result import Measured
from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.run.worlds import Machines, World, measure_each

COMMAND = "lanes"


def measure_worlds(
    rank_command: RankCommand,
    compared: Comparison,
    worlds: Sequence[int],
    report: Callable[[str], None],
) -> list[Measured]:
    """Measure with each number of ranks, one after the other.

    Args:
        rank_command: The training.
        compared: What is compared.
        worlds: The numbers of ranks.
        report: Called with a line for each of them.
    """
    found = measure_each(
        [World(world) for world in worlds],
        lambda world, result: _ranks_of(rank_command, compared, world.ranks, result),
        lambda result: [Measured.read(document) for document in read_json(result)],
        Machines(),
        report,
    )
    return [measured for one in found for measured in one]


def write_measured(measured: Sequence[Measured], path: Path) -> None:
    """Leave what ranks measured for the process that started them."""
    path.write_text(json.dumps([asdict(one) for one in measured]), encoding="utf-8")


def _ranks_of(
    rank_command: RankCommand, compared: Comparison, world: int, result: Path
) -> RankCommand:
    lanes = [count for count in compared.lanes if count >= world]
    options = ["--lanes", ",".join(map(str, lanes)), "--rounds", str(compared.rounds)]
    options += ["--result", str(result)]
    if compared.parallel:
        options += ["--parallel", ",".join(map(str, compared.parallel))]
    if compared.steps is not None:
        options += ["--steps", str(compared.steps)]
    # The config's own lanes may be too few for this world, and are measured with the others.
    overrides = [f"lanes={lanes[-1]}", f"run_dir={json.dumps(str(result.with_suffix('')))}"]
    weights = rank_command.config.distributed.lane_weights
    if weights is not None and len(weights) != world:
        overrides.append("distributed.lane_weights=null")
    ranks = rank_command.with_overrides(*overrides)
    config = override_config(ranks.config, ["distributed.launch_method=torchrun"])
    return replace(ranks, config=config, command=COMMAND, options=tuple(options))
