"""Starts ranks for each number of them, and reads what they measured. No torch here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.bench.document import Document
from samestep.config import Config, override_config
from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.run.worlds import Machines, World, measure_each


@dataclass(frozen=True)
class BenchCommand:
    """The command that every rank of a measurement runs."""

    name: str
    """As after `samestep`; it takes `--result FILE` besides its options."""
    config: Config
    file: Path | None
    """The config's; None for one that says nothing."""
    overrides: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def ranks(self, world: World, result: Path) -> RankCommand:
        """Return what the ranks of a world run, which leave what they measured in a file."""
        file = self.file
        if file is None:
            file = result.with_name("config.json")
            document = self.config.model_dump(mode="json", exclude_unset=True)
            file.write_text(json.dumps(document), encoding="utf-8")
        ours = [f"distributed.launch_method={world.via}"]
        if self.config.lane_count(world.ranks) < world.ranks:  # what is measured has enough
            ours.append(f"lanes={world.ranks}")
        if self.config.distributed.lane_weights is not None:
            ours.append("distributed.lane_weights=null")
        # Where a batch system keeps its files of the job.
        place = f"run_dir={json.dumps(str(result.with_suffix('')))}"
        return RankCommand(
            override_config(self.config, [*ours, place]),
            file,
            (*self.overrides, place),
            command=self.name,
            options=(*self.options, "--result", str(result)),
        )


def measure_worlds(
    command: BenchCommand, worlds: Sequence[World], report: Callable[[str], None], machines: Machines | None = None
) -> list[Document]:
    """Measure with each number of ranks, one after the other."""
    return measure_each(worlds, command.ranks, Document.read, machines or Machines(), report)
