"""Runs that are forked from a process which has imported what they need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from samestep.config import Config
from samestep.config.task_file import look_at_task
from samestep.launch.forkserver.client import WarmServer


@contextmanager
def warm_server(
    config: Config, threads: int, output: Path, wanted: bool, report: Callable[[str], None]
) -> Iterator[WarmServer | None]:
    """A server for the runs of a config, which begins to import at once; None where there is none.

    Args:
        threads: Of each rank of a run: some libraries read this when they are imported.
    """
    with ExitStack() as stack:
        server = None
        task = look_at_task(config)
        if wanted and sys.platform != "linux":
            report(f"runs are processes that start cold: a fork is safe on Linux, not on {sys.platform}")
        elif wanted and task is not None:
            server = WarmServer(task.path.resolve(), threads, output)
            stack.callback(server.close)
        yield server
