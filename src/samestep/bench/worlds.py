"""Starts ranks on this machine for each number of them, and reads what they measured. No torch here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from samestep.bench.document import Document
from samestep.config import Config, override_config
from samestep.distributed.signals import stopping_at_once
from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.commands.size import Size
from samestep.launch.run.prepare import Request, prepare


@dataclass(frozen=True)
class BenchCommand:
    """What every rank of a measurement runs."""

    name: str
    """As after `samestep`; it takes `--result FILE` besides its options."""
    config: Config
    file: Path | None
    """The config's; None for one that says nothing."""
    overrides: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def measure_worlds(
    command: BenchCommand, worlds: Sequence[int], report: Callable[[str], None]
) -> list[Document]:
    """Measure with each number of ranks, one after the other.

    Args:
        command: What a rank runs.
        worlds: The numbers of ranks.
        report: Called with a line for each of them.
    """
    with (
        stopping_at_once("the measurement", report) as check_stop,
        TemporaryDirectory(prefix="samestep-bench-", ignore_cleanup_errors=True) as folder,
    ):
        file = command.file
        if file is None:
            file = Path(folder) / "bench.json"
            document = command.config.model_dump(mode="json", exclude_unset=True)
            file.write_text(json.dumps(document), encoding="utf-8")
        found = []
        for world in worlds:
            report(f"measuring on {world} rank(s)")
            result = Path(folder) / f"world-{world}.json"
            ranks = RankCommand(
                override_config(
                    command.config,
                    [
                        f"lanes={world}",
                        "distributed.launch_method=torchrun",
                        # What ranks print is kept there, and nowhere that the user would find it.
                        f"run_dir={json.dumps(str(result.with_suffix('')))}",
                    ],
                ),
                file,
                command.overrides,
                command=command.name,
                options=(*command.options, "--result", str(result)),
            )
            launch = prepare(ranks, Request(nproc=Size(world, world)))
            launch.run(report, follow=True, quiet=True)
            check_stop()
            found.append(Document.read(result))
        return found
