"""The command that measures what saves and restores take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.bench.shared import Asked, Measurement, Rounds, measuring

if TYPE_CHECKING:
    from samestep.bench.document import Document
    from samestep.distributed.context import RunContext

Directory = Annotated[Path, typer.Option(help="On the disk to measure; nothing is left in it.", metavar="DIR")]
Megabytes = Annotated[
    int | None, typer.Option(min=1, max=100_000, help="Without a config: of its state; 100 (quick: 20).")
]
Inside = Annotated[Path | None, typer.Option(hidden=True)]
"""Where ranks that this command has started write."""


@measuring
def checkpoint(
    asked: Asked,
    directory: Directory = Path(),
    megabytes: Megabytes = None,
    rounds: Rounds = None,
    inside: Inside = None,
) -> Measurement:
    """Measure how long training pauses for a save, when it is on disk, and what a restore takes.

    With --worlds it starts ranks; else it is a process alone, or a rank of any launcher.

    Example: samestep bench checkpoint --worlds 1,2 --megabytes 500
    """
    from samestep.bench.builtin import builtin_config, width_of_state
    from samestep.bench.folders import folder_in
    from samestep.errors import PlanError

    if asked.file is not None and megabytes is not None:
        raise PlanError("--megabytes is for the built-in training: the config has its own size")
    turns = rounds or (3 if asked.quick else 7)
    width = width_of_state(megabytes or (20 if asked.quick else 100))
    config = asked.load(lambda: builtin_config(width=width))
    options = ["--rounds", str(turns)]
    if asked.start.counts:
        # One folder for all numbers of ranks, so that one restores what another has saved.
        folder = asked.scope.enter_context(folder_in(directory))
        options += ["--inside", str(folder.resolve())]

    def measure(place: RunContext) -> Document:
        from samestep.bench.checkpoint import CheckpointPlan, measure_checkpoint

        with _folder_of_ranks(place, directory, inside) as folder:
            return measure_checkpoint(config, place, CheckpointPlan(folder, turns))

    return Measurement(config, options, measure)


@contextmanager
def _folder_of_ranks(place: RunContext, directory: Path, inside: Path | None) -> Iterator[Path]:
    """Yield the folder that these ranks write to, which rank 0 makes and removes."""
    from samestep.bench.folders import folder_in

    if inside is not None:
        yield inside
    elif place.is_main:
        with folder_in(directory) as folder:
            yield place.broadcast(folder.resolve())
            place.barrier()
    else:
        yield place.broadcast(directory)
        place.barrier()
