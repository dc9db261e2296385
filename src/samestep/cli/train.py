"""The command that trains: train."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import (
    TRAINING,
    AsJson,
    HangTimeout,
    Launched,
    LocalRank,
    Overrides,
    PruneDir,
    RunFile,
    StartTimeout,
    TakesScript,
    Trace,
    TraceFrom,
    app,
    guarded,
)
from samestep.cli.ranks import as_rank, command_of_rank, run_script_as_rank
from samestep.distributed.signals import DeferredSignals
from samestep.environment.hardware import owned_cpus
from samestep.environment.variables import process_environment
from samestep.errors import LaunchError, Stopped

if TYPE_CHECKING:
    from samestep.config import Config
    from samestep.distributed.context import RunContext


@app.command(rich_help_panel=TRAINING, cls=TakesScript)
def train(
    context: typer.Context,
    config: RunFile,
    overrides: Overrides = None,
    record: Annotated[Path | None, typer.Option(help="Write the exact losses, samples and final state here.")] = None,
    stop_after: Annotated[int | None, typer.Option(min=1, help="Save and stop after this step; exits 75.")] = None,
    trace: Trace = None,
    trace_from: TraceFrom = 0,
    prune_dir: PruneDir = None,
    hang_timeout: HangTimeout = None,
    start_timeout: StartTimeout = None,
    as_json: AsJson = False,
    describe: Annotated[Path | None, typer.Option(hidden=True)] = None,
    local_rank: LocalRank = None,
    launched: Launched = False,
) -> None:
    """Train in this process: alone, or as a rank of any launcher.

    Example: samestep train config.yaml epochs=5
    """
    with guarded(launched), DeferredSignals():
        from samestep.config import load_config
        from samestep.launch.commands.rank_command import is_script

        command = command_of_rank(context, config, overrides or ())
        if is_script(config):
            if as_json:
                raise LaunchError(
                    "--json is for configs: a script prints what it likes. samestep show RUN --json prints "
                    "how a run ended"
                )
            from samestep.train.requests import Observation, ScriptRequest

            observation = Observation(record, stop_after, trace, trace_from, prune_dir)
            request = ScriptRequest(overrides or [], observation, describe)
            return run_script_as_rank(config, request, context, local_rank, command)
        loaded = load_config(config, overrides or [])
        with as_rank(loaded, context, local_rank) as place, ExitStack() as recording:
            from samestep.launch.commands.summary import more_processes_may_help
            from samestep.run.origin import started_by
            from samestep.train.train_once import train_once

            recording.enter_context(started_by(command))
            recording.enter_context(_watched(place, hang_timeout, start_timeout))
            on_gpu = place.device.type == "cuda"
            cpus = owned_cpus(process_environment()).value
            hint = more_processes_may_help(loaded, place.world, place.threads, cpus, on_gpu)
            if hint:
                place.log.main(hint)
            try:
                outcome = train_once(loaded, place, record, stop_after, trace, trace_from, prune_dir)
            except Stopped:
                _print_result(loaded, place, as_json)
                raise
            _print_result(loaded, place, as_json)
            if place.is_main and not as_json:
                loss = "" if outcome.loss is None else f", last loss {outcome.loss:.6f}"
                typer.echo(f"{outcome.steps} steps{loss}; the run is in {loaded.run_path}")


def _watched(
    place: RunContext, hang_timeout: float | None, start_timeout: float | None
) -> AbstractContextManager[None]:
    """While entered, a process that is alone ends if it hangs."""
    if hang_timeout is None or place.world > 1:
        return nullcontext()
    from samestep.distributed.health.watchdog import Watchdog

    return Watchdog(place.activity, hang_timeout, start_timeout)


def _print_result(config: Config, place: RunContext, as_json: bool) -> None:
    from samestep.checkpoint.run_result import read_result

    result = read_result(config.run_path) if as_json and place.is_main else None
    if result is not None:
        typer.echo(json.dumps({"run": str(config.run_path), **result.as_json()}))
