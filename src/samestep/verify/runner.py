"""Starts the runs of a verification, each in its own directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.config import override_config
from samestep.errors import Stopped
from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.run.launches import Launch, start
from samestep.launch.run.worlds import Machines, World, launch_of
from samestep.words import counted

_SAVE_UNITS = ("steps", "minutes", "epochs")
_NO_TRACKERS = (
    "trackers.tensorboard=false", "trackers.csv=false", "trackers.wandb=null", "trackers.mlflow=null",
    "trackers.classes=[]",
)  # fmt: skip
"""A proof is no training, and is not shown among those."""


@dataclass(frozen=True)
class Runner:
    """Starts the runs of a verification; holds what they share."""

    rank_command: RankCommand
    machines: Machines
    report: Callable[[str], None]

    def launch(
        self,
        world: World,
        run: Path,
        *,
        stop_after: int | None = None,
        saves: bool = False,
        resume: Path | None = None,
        trace_from: int | None = None,
    ) -> Launch:
        """Return the launch of one run, which keeps its exact record.

        Args:
            world: The number of ranks, and their launcher.
            run: The run's directory.
            stop_after: Stop after so many steps.
            saves: Whether it saves where it stops.
            resume: The directory of a run whose last checkpoint it begins with.
            trace_from: The first step of which it also writes every tensor.
        """
        overrides = [f"run_dir={json.dumps(str(run))}"]
        overrides.append(f"checkpoint.enabled={str(saves).lower()}")
        overrides += [*_NO_TRACKERS, "preemption.after_minutes=null"]
        if saves:
            overrides += [f"checkpoint.every_{unit}=null" for unit in _SAVE_UNITS]
        if resume is not None:
            overrides.append(f"resume.checkpoint={json.dumps(str(resume))}")
        if trace_from is not None:
            # A graph's replay, and what was compiled, call no hooks.
            overrides += ["speed.graph=false", "speed.compile=false", "distributed.shard_blocks=[]"]
        if world.shard is not None:
            overrides.append(f"distributed.shard={world.shard}")
        command = self.rank_command.with_overrides(*overrides, *self._even_lanes(world))
        method = f"distributed.launch_method={world.via}"
        command = replace(
            command,
            config=override_config(command.config, [method]),
            record=run / "record",
            stop_after=stop_after,
            trace=None if trace_from is None else run / "trace",
            trace_from=trace_from or 0,
        )
        return launch_of(world, command, self.machines)

    def _even_lanes(self, world: World) -> list[str]:
        weights = self.rank_command.config.distributed.lane_weights
        if weights is None or len(weights) == world.ranks:
            return []
        self.report(f"lane_weights are for {len(weights)} ranks: {counted(world.ranks, 'rank')} share lanes evenly")
        return ["distributed.lane_weights=null"]

    def run(self, launch: Launch) -> None:
        """Run it to its end, or to where it is to stop."""
        try:
            start(launch, self.report, follow=True, quiet=True)
        except Stopped:
            if launch.rank_command.stop_after is None:
                raise
