"""Environment variables of this process and of those it starts: the only place that reads them."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from samestep.errors import TextError
from samestep.parsing.numbers import whole_number


def process_environment() -> dict[str, str]:
    """Return a copy of this process's environment variables."""
    return dict(os.environ)


def export(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process, for the libraries that read them later."""
    os.environ.update(variables)


def replace_environment(variables: Mapping[str, str]) -> None:
    """Give this process these environment variables, and no others."""
    os.environ.clear()
    os.environ.update(variables)


def withdraw(names: Iterable[str]) -> None:
    """Remove environment variables that a library has set, which processes started later must not get."""
    for name in names:
        os.environ.pop(name, None)


@contextmanager
def exporting(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


OVERRIDES = "SAMESTEP_ARGS"


def script_overrides(environ: Mapping[str, str]) -> list[str]:
    """Return the `section.key=value` texts that `samestep.start` gets from the environment.

    Raises:
        TextError: The variable has a quotation mark that is not closed.
    """
    try:
        return shlex.split(environ.get(OVERRIDES, ""))
    except ValueError as error:
        raise TextError(f"cannot be split as a shell does: {error}") from None


def thread_variables(threads: int) -> dict[str, str]:
    """Return what sets the number of threads for every library of a new process.

    `torch.set_num_threads` does not reach all of them: on ARM, the one behind `linear` reads
    the variable once, when torch is imported.
    """
    return {"OMP_NUM_THREADS": str(threads)}


_LAUNCHER = "SAMESTEP_LAUNCHER"
_REPORT_PIPE, _ERROR_FILE = "SAMESTEP_REPORT_PIPE", "TORCHELASTIC_ERROR_FILE"


def report_variables(pipe: int) -> dict[str, str]:
    """Return what tells a rank where to report how it ended: a pipe that it inherits."""
    return {_REPORT_PIPE: f"{pipe}:{os.fstat(pipe).st_ino}", _LAUNCHER: str(os.getpid())}


def report_pipe(environ: Mapping[str, str]) -> int | None:
    """Return the pipe to this rank's launcher; None if another one started it.

    What a rank starts inherits the variable but not the pipe: there its number is another file's.
    """
    number, inode = map(whole_number, environ.get(_REPORT_PIPE, "").partition(":")[::2])
    if number is None:
        return None
    try:
        found = os.fstat(number)
    except (OSError, OverflowError):
        return None
    return number if stat.S_ISFIFO(found.st_mode) and found.st_ino == inode else None


def launcher_process(environ: Mapping[str, str]) -> int | None:
    """Return the process that started this one as a rank; None if it was not our launcher."""
    if report_pipe(environ) is None:
        return None
    return whole_number(environ.get(_LAUNCHER, ""))


_ENDS_WITH = "SAMESTEP_ENDS_WITH"


def ending_variables() -> dict[str, str]:
    """Return what tells a command to end with this process, which starts it."""
    return {_ENDS_WITH: str(os.getpid())}


def take_ending_process() -> int | None:
    """Return the process that this command is to end with, if one said so; not for what the command starts."""
    return whole_number(os.environ.pop(_ENDS_WITH, ""))


def error_file(environ: Mapping[str, str]) -> str:
    """Return where torchrun's agent looks up how this process failed; empty if none started it."""
    return environ.get(_ERROR_FILE, "")


def has_agent(environ: Mapping[str, str]) -> bool:
    """Return whether an agent, ours or torchrun's, started this process and learns how it failed."""
    return _REPORT_PIPE in environ or _ERROR_FILE in environ


def agent_serves_store(environ: Mapping[str, str]) -> bool:
    """Return whether the ranks meet at a store that their launcher's agent serves, not rank 0."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"


LAUNCH_ID = "SAMESTEP_LAUNCH_ID"


def launch_variables(name: str) -> dict[str, str]:
    """Return what identifies the launch that ranks belong to, also when they are restarted."""
    return {LAUNCH_ID: name}


def launch_names(environ: Mapping[str, str]) -> list[str]:
    """Return what stays the same when a launch, or a Slurm job, is restarted."""
    names = [environ[LAUNCH_ID]] if LAUNCH_ID in environ else []
    if "SLURM_JOB_ID" in environ:
        job = environ.get("SLURM_ARRAY_JOB_ID", environ["SLURM_JOB_ID"])
        names.append(f"slurm {job} {environ.get('SLURM_ARRAY_TASK_ID')}")
    return names


def is_same_launch(environ: Mapping[str, str], before: Sequence[str]) -> bool:
    """Return whether this is the launch of those names, restarted.

    One job may hold several launches: it is the same one only if the job was requeued, or if no
    launcher of ours set another name.
    """
    names = launch_names(environ)
    if LAUNCH_ID in environ and not environ.get("SLURM_RESTART_COUNT"):
        names = names[:1]
    return bool(set(names) & set(before))
