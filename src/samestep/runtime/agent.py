"""Starts ranks on this machine by torch's elastic agent, and tells which one failed and why."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import (
    DefaultLogsSpecs,
    SignalException,
    Std,
)
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from samestep import errors
from samestep.errors import RankFailed
from samestep.launchers.local import LocalLaunch
from samestep.runtime.environment import exporting, thread_variables


def run_ranks(launch: LocalLaunch) -> None:
    """Start the ranks and wait; raises `RankFailed` with the first failing rank's own words."""
    launch.folder.mkdir(parents=True, exist_ok=True)
    silenced = range(launch.nproc) if launch.quiet else range(1, launch.nproc)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=launch.nproc,
        run_id=uuid.uuid4().hex[:8],
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # the agent finds a free port and serves it
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(
            log_dir=str(launch.folder), redirects=dict.fromkeys(silenced, Std.ALL)
        ),
    )
    interpreter, *arguments = launch.command
    _quiet_agent_logs()
    try:
        with exporting(thread_variables(launch.threads)):
            elastic_launch(config, entrypoint=interpreter)(*arguments)
    except ChildFailedError as error:
        raise _as_one(error.failures, launch.folder) from None
    except SignalException as error:
        raise RankFailed(f"stopped by {error.sigval.name}", 128 + error.sigval) from None


def _quiet_agent_logs() -> None:
    """The agent warns about children it ends; we tell that ourselves, better."""
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class _Failure:
    rank: int
    pid: int
    code: int
    kind: str
    """The exception's class, if the rank could say it."""
    message: str
    trace: str
    time: float

    @property
    def is_cause(self) -> bool:
        """Whether this rank failed by itself, and not because another one did."""
        return self.kind != "PeerLost" and self.code != -15


def _as_one(failures: Mapping[int, ProcessFailure], folder: Path) -> RankFailed:
    """One error for all ranks: the one that failed by itself first, with its own words."""
    first, *others = sorted(
        (_read(rank, failure) for rank, failure in failures.items()),
        key=lambda failure: (not failure.is_cause, failure.time),
    )
    known = getattr(errors, first.kind, None)
    lines = [f"rank {first.rank} (pid {first.pid}) failed; output of the ranks: {folder}"]
    if known is not None:
        lines.append(first.message)
    else:
        lines.append(first.trace.rstrip() or _exit_words(first.code))
    for other in others:
        words = other.message.splitlines()[0] if other.message else _exit_words(other.code)
        lines.append(f"rank {other.rank} (pid {other.pid}): {words}")
    return RankFailed("\n".join(lines), 1 if known is None else known.exit_code)


def _read(rank: int, failure: ProcessFailure) -> _Failure:
    kind, message, trace = "", "", ""
    data: Any = failure.error_file_data
    if isinstance(data, dict) and failure.error_file != "<N/A>":
        said = data.get("message", {})
        if isinstance(said, str):
            said = json.loads(said) if said.startswith("{") else {"message": said}
        kind, _, message = str(said.get("message", "")).partition(": ")
        trace = str(said.get("extraInfo", {}).get("py_callstack", ""))
    return _Failure(
        rank, failure.pid, failure.exitcode, kind, message, trace, float(failure.timestamp)
    )


def _exit_words(code: int) -> str:
    if code < 0:
        return f"ended by signal {-code}"
    return f"ended with exit code {code} and left no traceback"
