"""What commands share that measure a training: a config's, or one that is built in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import usable
from samestep.cli.bench.shared import Start, on_worlds
from samestep.cli.ranks import as_rank

if TYPE_CHECKING:
    from samestep.bench.document import Document
    from samestep.config import Config
    from samestep.distributed.context import RunContext

TrainingConfig = Annotated[
    Path | None,
    typer.Argument(
        callback=usable,
        help="A training's config; one that is built in, if not given.",
        metavar="[CONFIG]",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Less of everything: a first look.")]


def load_training(file: Path | None, overrides: Sequence[str]) -> Config:
    """The config of what is measured."""
    from samestep.bench.builtin import builtin_config
    from samestep.config import load_config

    return builtin_config() if file is None else load_config(file, overrides)


def measure_training(
    name: str,
    config: Config,
    file: Path | None,
    overrides: Sequence[str],
    options: Sequence[str],
    start: Start,
    command: typer.Context,
    local_rank: int | None,
    measure: Callable[[RunContext], Document],
) -> Document | None:
    """Measure on ranks that are started here, or as a rank; None on ranks that have nothing to show.

    Args:
        name: The command's, after `samestep bench`.
        config: Of the training.
        file: The config's.
        overrides: Of it.
        options: What the ranks' command is given besides.
        start: The ranks to start, if any.
        command: The command that was called.
        local_rank: What a legacy launcher passed.
        measure: Called on each rank.
    """
    if start.counts:
        from samestep.bench.worlds import BenchCommand

        ranks = BenchCommand(f"bench {name}", config, file, tuple(overrides), tuple(options))
        return on_worlds(ranks, start)
    with as_rank(config, command, local_rank, needs_lanes=False) as place:
        found = measure(place)
    return found if place.is_main else None
