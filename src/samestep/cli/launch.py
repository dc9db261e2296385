"""The command that starts ranks: launch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.cli.app import (
    TRAINING,
    Overrides,
    PruneDir,
    RunFile,
    TakesAnyScript,
    Trace,
    TraceFrom,
    app,
    guarded,
    print_rows,
    script_arguments,
    typed_options,
)
from samestep.cli.script_args import MODULE_OPTION
from samestep.distributed.signals import DeferredSignals
from samestep.environment.launch import LaunchMethod
from samestep.environment.variables import exporting, process_environment
from samestep.errors import LaunchError

if TYPE_CHECKING:
    from samestep.launch.commands.plain_script import PlainScript
    from samestep.launch.commands.rank_command import RankCommand
    from samestep.launch.run.launches import Launch


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, **more)


def _slurm_option(key: str, **more: Any) -> Any:
    flag = "--" + key.replace("_", "-")
    return typer.Option(flag, help=f"launch.slurm.{key}", rich_help_panel="Slurm", **more)


Module = Annotated[bool, _option(MODULE_OPTION, help="A module instead of a script, as python -m starts it.")]
Launcher = Annotated[LaunchMethod | None, _option(help="Launcher of the ranks; distributed.launch_method.")]
Nproc = Annotated[str | None, _option(help="Ranks per machine, with mpirun in all; 2:4 continues without lost ones.")]
Nodes = Annotated[str | None, _option(help="Number of machines; 1:2 continues with one of two.")]
NodeRank = Annotated[int | None, _option(min=0, help="This machine's number, from 0.")]
MasterAddr = Annotated[str, _option(metavar="HOST", help="Host of machine 0.")]
MasterPort = Annotated[int | None, _option(min=1, max=65535, help="A port of machine 0; 29500.")]
Rendezvous = Annotated[str, _option(metavar="HOST:PORT", help="Host and port of the rendezvous, for elastic machines.")]
Hosts = Annotated[str, _option(metavar="a:4,b:4", help="For mpirun and ssh: hosts and ranks.")]
Restarts = Annotated[int, _option(min=0, help="How often failed ranks are restarted.")]
Show = Annotated[bool, _option("--print", help="Show plan and command or script; run nothing.")]
Write = Annotated[Path | None, _option(metavar="FILE", help="Save the script; run nothing.")]
Follow = Annotated[bool, _option("--follow", help="Follow a Slurm job until it ends.")]
Record = Annotated[Path | None, typer.Option(hidden=True)]
StopAfter = Annotated[int | None, typer.Option(hidden=True)]
StdinControl = Annotated[bool, typer.Option("--stdin-control", hidden=True)]
ReadSecret = Annotated[bool, typer.Option("--read-secret", hidden=True)]
# The job ends with this command; one that an earlier command left is taken over.
OwnJob = Annotated[bool, typer.Option("--own-job", hidden=True)]
RankCommandName = Annotated[str, typer.Option("--rank-command", hidden=True)]
RankArgs = Annotated[list[str] | None, typer.Option("--rank-arg", hidden=True)]
"""What its ranks are other than `samestep train`, and that command's options: a launch of ours on another machine."""
_OBSERVED = ("record", "stop_after", "trace", "trace_from", "prune_dir")
_NOT_REPEATED = ("show", "write", *_OBSERVED, "stdin_control", "read_secret", "own_job", "rank_command", "rank_arg")
"""Options of `launch` that a resumed run is started without."""
_STEP_OPTIONS = {"srun": ("cpus_per_task", "gpus_per_node")}
"""Slurm's options that a step of an allocation takes too, by launcher."""
_REQUESTED = ("node_rank", "master_addr", "master_port", "rendezvous", "hosts", "max_restarts")


@app.command(rich_help_panel=TRAINING, cls=TakesAnyScript)
def launch(
    context: typer.Context,
    config: RunFile,
    overrides: Overrides = None,
    module: Module = False,
    via: Launcher = None,
    nproc: Nproc = None,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = "",
    master_port: MasterPort = None,
    rendezvous: Rendezvous = "",
    hosts: Hosts = "",
    max_restarts: Restarts = 0,
    show: Show = False,
    write: Write = None,
    follow: Follow = False,
    gpus_per_node: Annotated[int | None, _slurm_option("gpus_per_node")] = None,
    cpus_per_task: Annotated[int | None, _slurm_option("cpus_per_task")] = None,
    partition: Annotated[str | None, _slurm_option("partition")] = None,
    time: Annotated[str | None, _slurm_option("time")] = None,
    array: Annotated[str | None, _slurm_option("array")] = None,
    record: Record = None,
    stop_after: StopAfter = None,
    trace: Trace = None,
    trace_from: TraceFrom = 0,
    prune_dir: PruneDir = None,
    stdin_control: StdinControl = False,
    read_secret: ReadSecret = False,
    own_job: OwnJob = False,
    rank_command: RankCommandName = "train",
    rank_arg: RankArgs = None,
) -> None:
    """Start the ranks of a run: on this machine, on others, by mpirun, or as a Slurm job.

    A script that opens no run, and a module, is started as torchrun would: launch --nproc 2 train.py --lr 0.1

    Example: samestep launch config.yaml --nproc 4
    """
    with guarded(), DeferredSignals():
        from samestep.launch.commands.slurm import SlurmJob
        from samestep.launch.run.launches import start

        prepared, variables = _prepared(context)
        if follow and not isinstance(prepared, SlurmJob):
            raise LaunchError("--follow is for Slurm jobs: other launches are followed anyway")
        if show or write is not None:
            return _show(prepared, show, write)
        _use_input(stdin_control, read_secret)
        with exporting(variables):
            start(prepared, _report, follow=follow, held=own_job)


def _prepared(context: typer.Context) -> tuple[Launch, dict[str, str]]:
    """Return what is to be launched, and the variables that tell its ranks how to resume it."""
    from samestep.launch.commands.plain_script import is_plain
    from samestep.launch.commands.size import Size
    from samestep.launch.run.prepare import LaunchRequest, prepare, prepare_plain

    given = context.params
    sizes = {name: None if given[name] is None else Size.parse(given[name], f"--{name}") for name in ("nproc", "nodes")}
    shown = bool(given["show"]) or given["write"] is not None
    named = {name: given[name] for name in _REQUESTED}
    request = LaunchRequest(**sizes, **named, only_shown=shown)  # type: ignore[arg-type]
    file = given["config"]
    if given["module"] or is_plain(file):
        return prepare_plain(_plain_script(context, file), request), {}
    rank_command = _rank_command(context, file, given["overrides"] or [], given["via"])
    return prepare(rank_command, request), _rank_variables(context, rank_command)


def _plain_script(context: typer.Context, file: Path) -> PlainScript:
    """Return a script that is started as torchrun would; refuses what only a run can have."""
    from samestep.launch.commands.plain_script import PlainScript

    params = context.params
    observing = ("record", "stop_after", "trace", "prune_dir")
    given = [*(name for name in observing if params[name] is not None), *_slurm_options(context)]
    given += ["via"] if params["via"] not in (None, "torchrun") else []
    if given:
        shown = ", ".join("--" + name.replace("_", "-") for name in given)
        raise LaunchError(
            f"{shown} is for runs, and {file} calls no samestep.start itself: its ranks are started as "
            "torchrun does. Leave it out, or put -- before it if it is an argument of the script"
        )
    return PlainScript(str(file), params["module"], script_arguments(context))


def _rank_variables(context: typer.Context, rank_command: RankCommand) -> dict[str, str]:
    """Return how `samestep resume` starts the run again; nothing where no single command does."""
    from samestep.launch.commands.recorded import RecordedCommand

    file = rank_command.file
    outer = RecordedCommand.of_launcher(process_environment(), file)
    if outer is not None:  # this launch is one machine's part of another
        return outer.variables()
    options = typed_options(context, *_NOT_REPEATED)
    config = rank_command.config
    if context.params["node_rank"] is not None or config.launch.slurm.array is not None:
        return {}
    overrides = tuple(context.params["overrides"] or ())
    return RecordedCommand("launch", str(file), str(Path.cwd()), overrides, options, rank_command.arguments).variables()


def _use_input(stdin_control: bool, read_secret: bool) -> None:
    """Use the input of a launcher on another machine: the secret, and its end."""
    if read_secret:
        from samestep.environment.secret import receive_secret

        receive_secret()
    if stdin_control:
        from samestep.distributed.signals import stop_with_input

        stop_with_input()


def _report(line: str) -> None:
    typer.echo(f"samestep: {line}", err=True)


def _rank_command(context: typer.Context, config: Path, overrides: list[str], via: LaunchMethod | None) -> RankCommand:
    """Return what the ranks run, with the options applied; Slurm's override the launch section."""
    from samestep.launch.commands.rank_command import RankCommand
    from samestep.launch.commands.slurm import for_the_first_task
    from samestep.launch.run.target import read_target

    params, arguments = context.params, script_arguments(context)
    given = _slurm_options(context)
    options = [f"launch.slurm.{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()]
    if via is not None:
        options.append(f"distributed.launch_method={via}")
    loaded = read_target(config, [*for_the_first_task(overrides), *options], arguments)
    method = loaded.distributed.launch_method
    wrong = [key for key in given if method != "slurm" and key not in _STEP_OPTIONS.get(method, ())]
    if wrong:
        shown = ", ".join("--" + key.replace("_", "-") for key in wrong)
        raise LaunchError(f"{shown} is for Slurm, but the launcher is {method}: add --via slurm")
    # How they are started is no option of the ranks.
    observed = {name: params[name] for name in _OBSERVED}
    return RankCommand(
        loaded,
        config,
        tuple(overrides),
        arguments=arguments,
        command=params["rank_command"],
        options=tuple(params["rank_arg"] or ()),
        **observed,
    )


def _slurm_options(context: typer.Context) -> dict[str, Any]:
    """Return the options that are keys of launch.slurm, if they were given."""
    from samestep.config.launch import SlurmConfig

    values = {key: context.params.get(key) for key in SlurmConfig.model_fields}
    return {key: value for key, value in values.items() if value is not None}


def _show(prepared: Launch, show: bool, write: Path | None) -> None:
    script = prepared.script()
    if show:
        # The plan on stderr: the script may be piped to a file or to sbatch.
        print_rows(("", "plan"), prepared.summary(), err=True)
        typer.echo(script, nl=False)
    if write is not None:
        from samestep.launch.run.slurm import write_private

        try:
            write_private(write, script, 0o700, new=True)
        except FileExistsError:
            raise LaunchError(f"{write} exists already: remove it, or name another file") from None
        except (OSError, UnicodeError) as error:
            raise LaunchError(f"{write} cannot be written: {error}") from None
        _report(f"wrote {write}")
