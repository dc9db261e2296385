"""Environment variables of this process and of those it starts: the only place that reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager


def process_environment() -> dict[str, str]:
    """A copy of this process's environment variables."""
    return dict(os.environ)


def export(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process, for the libraries that read them later."""
    os.environ.update(variables)


def withdraw(name: str) -> None:
    """Unset an environment variable of this process."""
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


def thread_variables(threads: int) -> dict[str, str]:
    """What sets the number of threads for every library of a new process.

    `torch.set_num_threads` does not reach all of them: on ARM, the one behind `linear` reads
    the variable once, when torch is imported.
    """
    return {"OMP_NUM_THREADS": str(threads)}


def has_agent(environ: Mapping[str, str]) -> bool:
    """Whether torch's elastic agent started this process and will look up how it failed."""
    return "TORCHELASTIC_ERROR_FILE" in environ


def agent_serves_store(environ: Mapping[str, str]) -> bool:
    """Whether the ranks meet at a store that their launcher's agent serves, not rank 0."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"


LAUNCH_ID = "SAMESTEP_LAUNCH_ID"


def launch_variables(name: str) -> dict[str, str]:
    """What identifies the launch that ranks belong to, also when they are restarted."""
    return {LAUNCH_ID: name}


def launch_names(environ: Mapping[str, str]) -> list[str]:
    """What stays the same when a launch, or a Slurm job, is restarted."""
    names = [environ[LAUNCH_ID]] if LAUNCH_ID in environ else []
    if "SLURM_JOB_ID" in environ:
        job = environ.get("SLURM_ARRAY_JOB_ID", environ["SLURM_JOB_ID"])
        names.append(f"slurm {job} {environ.get('SLURM_ARRAY_TASK_ID')}")
    return names


def is_same_launch(environ: Mapping[str, str], before: Sequence[str]) -> bool:
    """Whether this is the launch of those names, restarted.

    One job may hold several launches: it is the same one only if the job was requeued, or if no
    launcher of ours set another name.
    """
    names = launch_names(environ)
    if LAUNCH_ID in environ and not environ.get("SLURM_RESTART_COUNT"):
        names = names[:1]
    return bool(set(names) & set(before))
