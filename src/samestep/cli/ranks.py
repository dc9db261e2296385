"""Commands that run as a rank: alone, or under any launcher."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from samestep.cli.app import script_arguments
from samestep.environment.launch import LaunchFacts, check_local_rank, detect_launch
from samestep.environment.variables import exporting, has_agent, launcher_process, process_environment, thread_variables
from samestep.launch.forkserver.forked import FORKED

if TYPE_CHECKING:
    from samestep.config import Config
    from samestep.distributed.context import RunContext
    from samestep.launch.commands.recorded import RecordedCommand
    from samestep.train.requests import ScriptRequest


@contextmanager
def as_rank(
    config: Config, command: typer.Context, local_rank: int | None, needs_lanes: bool = True
) -> Iterator[RunContext]:
    """This process's place among the ranks. Import what needs torch inside, not before.

    Args:
        config: The run's config.
        command: The command that was called.
        local_rank: What a legacy launcher passed.
        needs_lanes: Whether every rank must have a lane, as training requires.
    """
    launch = detect_launch(process_environment())
    with _threads_before_torch(config, launch):
        from samestep.distributed.context import create_run_context
        from samestep.distributed.hardware import detect_hardware

        _obey_launcher(command, local_rank, launch)
        hardware = detect_hardware()
        with create_run_context(config, hardware, launch, needs_lanes=needs_lanes) as place:
            yield place


def run_script_as_rank(
    script: Path,
    request: ScriptRequest,
    command: typer.Context,
    local_rank: int | None,
    recorded: RecordedCommand | None,
) -> None:
    """Run a script that opens its run itself; its threads are set when that is known."""
    from samestep.run.origin import started_by
    from samestep.train.requests import run_script

    _obey_launcher(command, local_rank, detect_launch(process_environment()))
    with started_by(recorded):
        run_script(script, script_arguments(command), request)


def command_of_rank(command: typer.Context, file: Path, overrides: Sequence[str]) -> RecordedCommand | None:
    """Return what a person typed to start this process, or its launcher; None if another launcher did."""
    from samestep.launch.commands.recorded import RecordedCommand

    environ = process_environment()
    launched = RecordedCommand.of_launcher(environ, file)
    if launched is not None or detect_launch(environ).world > 1:
        return launched
    arguments = script_arguments(command)
    return RecordedCommand("train", str(file), str(Path.cwd()), tuple(overrides), (), arguments)


def _obey_launcher(command: typer.Context, local_rank: int | None, launch: LaunchFacts) -> None:
    from samestep.distributed.signals import end_with_parent

    environ = process_environment()
    if has_agent(environ):
        end_with_parent(signal.SIGTERM, launcher_process(environ))
    check_local_rank(command.obj if local_rank is None else local_rank, launch)


def _threads_before_torch(config: Config, launch: LaunchFacts) -> AbstractContextManager[None]:
    """Set the threads of the libraries under torch: some read them when torch is imported.

    This replaces torchrun's value, which is 1 unless the user set one.
    """
    from samestep.distributed.placement import chosen_threads, share_of_a_rank
    from samestep.environment.hardware import expects_gpu, owned_cpus

    section, environ = config.distributed, process_environment()
    on_cpu = section.device == "cpu" or not expects_gpu(environ)
    threads = chosen_threads(section, launch.threads, on_cpu, config.same)
    if threads is None:
        threads = share_of_a_rank(owned_cpus(environ), launch.cpus_per_rank, launch.local_world)
    forked = FORKED.get()
    if forked is not None:
        forked.needs_threads(threads.value)
    return exporting(thread_variables(threads.value))
