"""The command that averages a run's checkpoints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import MODELS, AsJson, LocalRank, Overrides, RunDirPath, Trust, app, guarded, print_rows
from samestep.cli.ranks import as_rank
from samestep.errors import LaunchError

if TYPE_CHECKING:
    from samestep.models.checkpoint_average import Averaged, By

_Last = Annotated[int | None, typer.Option(min=1, help="Average this many newest checkpoints.")]
_Best = Annotated[int | None, typer.Option(min=1, help="Or this many with the best best.metric.")]


@app.command(rich_help_panel=MODELS)
def average(
    context: typer.Context,
    run: RunDirPath,
    overrides: Overrides = None,
    last: _Last = None,
    best: _Best = None,
    trust: Trust = False,
    as_json: AsJson = False,
    local_rank: LocalRank = None,
) -> None:
    """Average a run's last or best checkpoints, measure the mean and write average.safetensors.

    Alone, or as a rank of any launcher. Without --last and --best: the checkpoint.keep_last
    newest.

    Example: samestep average runs/digits --last 3
    """
    with guarded():
        from samestep.run.origin import refuse_untrusted_task
        from samestep.run.run_dir import config_of

        if last is not None and best is not None:
            raise LaunchError(f"you set --last {last} and --best {best}: keep one of them")
        config = config_of(run, overrides or [])
        refuse_untrusted_task(run, config, overrides or (), trust)  # before it sets up the ranks
        with as_rank(config, context, local_rank) as place:
            from samestep.models.checkpoint_average import average_run

            count = best or last or config.checkpoint.keep_last
            by: By = "best" if best else "last"
            made = average_run(run, config, place, count, by, overrides or (), trust)
            if place.is_main:
                _show(made, as_json)


def _show(made: Averaged, as_json: bool) -> None:
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "metric": made.metric,
                    "checkpoints": [{"step": step, "value": value} for step, value in made.checkpoints.items()],
                    "average": {"value": made.value, "metrics": made.values},
                    "path": str(made.path),
                }
            )
        )
        return
    rows = [(f"step {step}", _number(value)) for step, value in made.checkpoints.items()]
    print_rows(("weights", made.metric), [*rows, ("their average", _number(made.value))])
    typer.echo(f"wrote {made.path}")


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.6g}"
