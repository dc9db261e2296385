"""Options of the commands of `samestep tune`, and the command of the ranks that they start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samestep.cli.app import MODELS, ConfigFile, Launched, LocalRank, Overrides, app, guarded
from samestep.cli.ranks import as_rank
from samestep.distributed.signals import DeferredSignals

tune_app = typer.Typer(help="Measure which settings suit a training on this machine.", no_args_is_help=True)
app.add_typer(tune_app, name="tune", rich_help_panel=MODELS)

Rounds = Annotated[int, typer.Option(min=1, help="Rounds per choice; a range needs 4.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Timed steps per turn; about a second's, if not given.")]


@tune_app.command(hidden=True)
def measure(
    context: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    variants: Annotated[str, typer.Option()] = "[]",
    rounds: Rounds = 5,
    steps: Steps = None,
    result: Annotated[Path, typer.Option()] = Path("result.json"),
    local_rank: LocalRank = None,
    launched: Launched = False,
) -> None:
    """Time variants of a config as a rank; what `samestep tune` starts."""
    with guarded(launched), DeferredSignals():
        from samestep.bench.tuning.variants import from_text
        from samestep.config import load_config

        loaded, tried = load_config(config, overrides or []), from_text(variants)
        with as_rank(loaded, context, local_rank, needs_lanes=False) as place:
            from samestep.bench.tuning.timing import time_variants

            found = time_variants(loaded, place, tried, rounds, steps)
        if place.is_main:
            found.write(result)
