"""The commands of sweeps: sweep run, sweep best. Also the table that `show SWEEP` prints."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.cli.app import TRAINING, AsJson, Commands, ConfigFile, Overrides, app, guarded, print_rows, usable
from samestep.cli.cv import SeedOption, StratifyOption
from samestep.distributed.signals import DeferredSignals
from samestep.environment.launch import LaunchMethod
from samestep.errors import RunDirError

if TYPE_CHECKING:
    from samestep.checkpoint.directory_lock import Holder
    from samestep.sweep.loading import LoadedSweep
    from samestep.sweep.selection import Choice
    from samestep.sweep.storage import TrialRecord

sweep_app = typer.Typer(cls=Commands, help="Search for a config's values with Optuna.", no_args_is_help=True)
app.add_typer(sweep_app, name="sweep", rich_help_panel=TRAINING)

SweepOrName = Annotated[
    str,
    typer.Argument(
        callback=usable,
        help="The sweep's YAML or JSON file; or, to resume one, its name or directory.",
        metavar="SWEEP",
    ),
]
Name = Annotated[str, typer.Argument(callback=usable, help="A sweep's name or directory.", metavar="SWEEP")]
TrustSweep = Annotated[
    bool, typer.Option("--trust", help="Run the code that SWEEP names, also if it may not be yours.")
]
TrustStorage = Annotated[
    bool, typer.Option("--trust", help="Connect to the database that SWEEP names, also if it may not be yours.")
]
PreferFaster = Annotated[
    float | None,
    typer.Option(
        "--prefer-faster-within",
        min=0.0,
        max=1.0,
        metavar="SHARE",
        help="Take the fastest trial whose value is worse by at most this share: 0.015 is 1.5 %.",
    ),
]
TrialNumber = Annotated[
    int | None, typer.Option("--trial", min=0, metavar="N", help="Take this complete trial, not the best.")
]


ViaOption = Annotated[LaunchMethod | None, typer.Option("--via", help="Launcher of each trial's ranks; the key via.")]
HostsOption = Annotated[
    str | None, typer.Option("--hosts", metavar="a:4,b:4", help="For mpirun and ssh; the key hosts.")
]
SweepOverrides = Annotated[
    list[str] | None, typer.Argument(help="Values of the sweep, as key=value.", metavar="KEY=VALUE")
]


@sweep_app.command()
def run(
    sweep: SweepOrName,
    overrides: SweepOverrides = None,
    via: ViaOption = None,
    hosts: HostsOption = None,
    trust: TrustSweep = False,
    as_json: AsJson = False,
) -> None:
    """Run a sweep; started again, it resumes, also with more trials. Exits 1 if no trial is complete.

    Example: samestep sweep run sweep.yaml trials=100
    """
    with guarded(), DeferredSignals():
        from samestep.sweep.loading import load_sweep
        from samestep.sweep.reading import resumed_sweep
        from samestep.sweep.study_folder import sweep_folder

        given, file = _overrides(overrides, via, hosts), Path(sweep)
        folder = None if file.is_file() else sweep_folder(sweep)
        loaded = load_sweep(file, given) if folder is None else resumed_sweep(folder, given, trust)
        found = _run(loaded, as_json)
    _exit(found)


def _overrides(given: list[str] | None, via: LaunchMethod | None, hosts: str | None) -> list[str]:
    """Return what was typed, with the options as the keys that they are."""
    options = {"via": via, "hosts": hosts}
    typed = [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None]
    return [*(given or []), *typed]


def _run(loaded: LoadedSweep, as_json: bool) -> list[TrialRecord]:
    from samestep.sweep.coordinator import run_sweep

    if sys.stderr.isatty():
        from rich.console import Console

        from samestep.cli.live_sweep import LiveSweepTable

        with LiveSweepTable(loaded, Console(stderr=True)) as table:
            found = run_sweep(loaded, table.line, table.show)
    else:
        found = run_sweep(loaded, lambda line: typer.echo(line, err=True))
    _show(loaded, found, as_json)
    return found


def _exit(trials: list[TrialRecord]) -> None:
    if not any(trial.state == "complete" for trial in trials):
        raise typer.Exit(1)


def show_sweep(folder: Path, as_json: bool, trust: bool) -> None:
    """Print a sweep's trials, also while it runs, and whether a process runs it."""
    from samestep.sweep.reading import reload_sweep, trials_of
    from samestep.sweep.study_folder import coordinator_of

    loaded = reload_sweep(folder, trust)
    holder = coordinator_of(folder)
    process = holder and {"process": holder.text, "heartbeat_age": round(holder.age, 1), "alive": holder.is_alive}
    _show(loaded, trials_of(loaded), as_json, {"coordinator": process})
    if not as_json:
        typer.echo(_coordinator_words(holder, folder))


def _coordinator_words(holder: Holder | None, folder: Path) -> str:
    if holder is None:
        return "no process runs it"
    if holder.is_alive:
        return f"run by {holder.words()}"
    return f"no process runs it: the last one was {holder.words()}; samestep sweep run {folder} continues"


@sweep_app.command()
def best(
    name: Name,
    faster: PreferFaster = None,
    number: TrialNumber = None,
    as_config: Annotated[bool, typer.Option("--config", help="Print its config, for samestep train.")] = False,
    as_json: AsJson = False,
    trust: TrustStorage = False,
) -> None:
    """Show a sweep's best trial, or the fastest one that is nearly as good; with several objectives
    those that no other trial is better than in all of them.

    Example: samestep sweep best digits --config > best.yaml
    """
    with guarded():
        from samestep.sweep.reading import reload_sweep, trial_config, trials_of
        from samestep.sweep.study_folder import find_sweep

        if as_config and as_json:
            raise RunDirError("--config prints YAML, and --json the trial: give one of them")
        loaded = reload_sweep(find_sweep(name), trust)
        several = bool(loaded.sweep.further_objectives) and faster is None and number is None
        if several and not as_config:
            from samestep.sweep.storage import front

            found = front(loaded.sweep, trials_of(loaded))
            _show(loaded, found, as_json)
            return _exit(found)
        trial, choice = _chosen(loaded, faster, number)
        metric = loaded.sweep.objective.metric
        if as_config:
            why = "" if choice is None else choice.words(metric)
            typer.echo(trial_config(loaded, trial, why), nl=False)
        elif as_json:
            more = {} if choice is None else {"choice": choice.as_json()}
            typer.echo(json.dumps({**trial.as_json(), **more}))
        else:
            print_rows(_header(loaded), [_row(loaded, trial)])
            if choice is not None:
                _explain(choice, metric)


def _explain(choice: Choice, metric: str) -> None:
    print_rows(*choice.figures(metric))
    typer.echo("measured here in interleaved rounds: the median, and between which half of the rounds were")
    typer.echo(choice.words(metric))


def _chosen(loaded: LoadedSweep, faster: float | None, number: int | None) -> tuple[TrialRecord, Choice | None]:
    """Return the trial to take, and why if it may not be the best."""
    from samestep.sweep.reading import best_trial, complete_trial
    from samestep.sweep.selection import prefer_faster

    if number is not None:
        if faster is not None:
            raise RunDirError("--trial and --prefer-faster-within both choose a trial: give one")
        return complete_trial(loaded, number), None
    name = loaded.sweep.name
    if loaded.sweep.further_objectives:
        raise RunDirError(
            f"{name} has several objectives, and so no single best trial: samestep sweep best {name} lists "
            "those to choose from; --trial N takes one"
        )
    choice = None if faster is None else prefer_faster(loaded, faster)
    return (best_trial(loaded) if choice is None else choice.trial), choice


@app.command(hidden=True)
def probe(
    config: ConfigFile,
    result: Annotated[Path, typer.Option()],
    overrides: Overrides = None,
    k: Annotated[int | None, typer.Option("--folds")] = None,
    stratify: StratifyOption = "auto",
    seed: SeedOption = 0,
    output: Annotated[Path, typer.Option()] = Path("folds.json"),
) -> None:
    """Ask a config's task for its metrics, and split its data; for the process that runs a sweep."""
    with guarded():
        from samestep.config import load_config
        from samestep.sweep.probe_task import task_info
        from samestep.sweep.study_folder import write_document

        split = None if k is None else (k, stratify, seed)
        write_document(result, task_info(load_config(config, overrides or []), split, output))


@app.command(hidden=True)
def latency(
    context: typer.Context,
    runs: list[Path],
    result: Annotated[Path, typer.Option()],
    batch: Annotated[int, typer.Option(min=1)],
) -> None:
    """Measure how long the models of runs take; for samestep sweep best."""
    with guarded():
        from samestep.cli.ranks import as_rank
        from samestep.run.run_dir import config_of
        from samestep.sweep.study_folder import write_document

        config = config_of(runs[0], ["distributed.world_size=auto"])  # it may have been trained on more
        with as_rank(config, context, None, needs_lanes=False) as place:
            from samestep.models.latency import time_models

            write_document(result, time_models(runs, batch, place))


@app.command(hidden=True)
def warm(channel: int, task: Path, threads: int, padding: str) -> None:
    """Fork runs of a task from a process that has torch imported; for the process that runs a sweep."""
    from samestep.launch.forkserver.server import serve

    del padding  # space for the command lines of the runs
    command = typer.main.get_command(app)  # made once, which takes as long as a small run
    serve(socket.socket(fileno=channel), task, threads, lambda words: command(list(words)))


def _show(loaded: LoadedSweep, trials: list[TrialRecord], as_json: bool, more: Mapping[str, Any] | None = None) -> None:
    if as_json:
        sweep = loaded.sweep
        document: dict[str, Any] = {
            "name": sweep.name, "folder": str(sweep.path), "metric": sweep.objective.metric, "storage": sweep.storage,
            **({"metrics": sweep.metrics} if sweep.further_objectives else {}),
        }  # fmt: skip
        document |= more or {}
        typer.echo(json.dumps({**document, "trials": [trial.as_json() for trial in trials]}))
    else:
        best = _best_numbers(loaded, trials)
        rows = [_row(loaded, trial, trial.number in best) for trial in trials]
        print_rows(_header(loaded), rows, best=[at for at, one in enumerate(trials) if one.number in best])


def _best_numbers(loaded: LoadedSweep, trials: list[TrialRecord]) -> set[int]:
    """Return the best trial; with several objectives those that no other is better than in all."""
    from samestep.sweep.storage import best_of, front

    if loaded.sweep.further_objectives:
        return {trial.number for trial in front(loaded.sweep, trials)}
    best = best_of(loaded.sweep, trials)
    return set() if best is None else {best.number}


def _header(loaded: LoadedSweep) -> tuple[str, ...]:
    return ("trial", "state", *loaded.sweep.metrics, *loaded.sweep.domains, "remarks")


def _row(loaded: LoadedSweep, trial: TrialRecord, best: bool = False) -> tuple[Any, ...]:
    from samestep.sweep.storage import trial_cells

    state = f"{trial.state}, best" if best else trial.state
    return (trial.number, state, *trial_cells(loaded.sweep, trial.results, trial.values), trial.remark)
