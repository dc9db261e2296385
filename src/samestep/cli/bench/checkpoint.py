"""The command that measures what saves and restores take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import AsJson, Launched, LocalRank, Overrides, guarded
from samestep.cli.bench.shared import (
    Hosts,
    Nodes,
    Output,
    Page,
    Result,
    Start,
    Via,
    ViaOption,
    Worlds,
    bench_app,
    hand_over,
    refuse_files,
)
from samestep.cli.bench.training import Quick, TrainingConfig, load_training, measure_training
from samestep.distributed.deferred_signals import DeferredSignals

if TYPE_CHECKING:
    from samestep.bench.document import Document
    from samestep.distributed.context import RunContext

Directory = Annotated[
    Path, typer.Option(help="On the disk to measure; nothing is left in it.", metavar="DIR")
]
Turns = Annotated[
    int | None, typer.Option(min=3, help="Turns of each; 7 (quick: 3), if not given.")
]
Megabytes = Annotated[
    int | None,
    typer.Option(min=1, max=100_000, help="Without a config: of its state; 100 (quick: 20)."),
]
Inside = Annotated[Path | None, typer.Option(hidden=True)]
"""Where ranks that this command has started write."""


@bench_app.command()
def checkpoint(
    context: typer.Context,
    config: TrainingConfig = None,
    overrides: Overrides = None,
    worlds: Worlds = "",
    via: ViaOption = Via.torchrun,
    nodes: Nodes = 1,
    hosts: Hosts = "",
    directory: Directory = Path(),
    megabytes: Megabytes = None,
    rounds: Turns = None,
    quick: Quick = False,
    as_json: AsJson = False,
    output: Output = None,
    report: Page = None,
    result: Result = None,
    inside: Inside = None,
    local_rank: LocalRank = None,
    launched: Launched = False,
) -> None:
    """Measure how long training pauses for a save, when it is on disk, and what a restore takes.

    With --worlds it starts ranks; else it is a process alone, or a rank of any launcher.
    """
    with guarded(launched), DeferredSignals():
        from samestep.bench.builtin import builtin_config, width_of_state
        from samestep.errors import PlanError

        if config is not None and megabytes is not None:
            raise PlanError("--megabytes is for the built-in training: the config has its own size")
        rounds = rounds or (3 if quick else 7)
        start = Start.parse(worlds, via, nodes, hosts)
        refuse_files(output, report)
        if config is None:
            loaded = builtin_config(width=width_of_state(megabytes or (20 if quick else 100)))
        else:
            loaded = load_training(config, overrides or [])

        def measure(place: RunContext) -> Document:
            from samestep.bench.checkpoint import CheckpointPlan, measure_checkpoint

            with _folder_of_ranks(place, directory, inside) as folder:
                return measure_checkpoint(loaded, place, CheckpointPlan(folder, rounds))

        with _folder_of_worlds(directory, bool(start.counts)) as folder:
            options = ["--rounds", str(rounds), "--inside", str(folder)]
            found = measure_training(
                "checkpoint", loaded, config, overrides or [], options, start, context, local_rank,
                measure,
            )  # fmt: skip
        if found is not None:
            hand_over(found, as_json, output, report, result)


@contextmanager
def _folder_of_worlds(directory: Path, starts_ranks: bool) -> Iterator[Path | None]:
    """Where several numbers of ranks write, so that one restores what another has saved."""
    from samestep.bench.folders import folder_in

    if not starts_ranks:
        yield None
        return
    with folder_in(directory) as folder:
        yield folder.resolve()


@contextmanager
def _folder_of_ranks(place: RunContext, directory: Path, inside: Path | None) -> Iterator[Path]:
    """Where these ranks write: all in one folder, which rank 0 makes and removes."""
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
