"""From the exit codes and error files of all ranks: which one failed by itself, and why."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from samestep import errors
from samestep.errors import RankFailed, SamestepError, Stopped, UserError


class ExitReport(Exception):
    """How a launch ended."""

    def __init__(self, error: SamestepError, headline: str, lost: tuple[int, ...]) -> None:
        super().__init__(headline)
        self.error = error
        """For the person who launched."""
        self.headline = headline
        self.lost = lost
        """Ranks that were killed or crashed, and may not come back."""

    @property
    def may_pass(self) -> bool:
        """Whether a restart could succeed."""
        return not isinstance(self.error, Stopped) and self.error.exit_code != UserError.exit_code


@dataclass(frozen=True)
class _Failure:
    rank: int
    pid: int
    code: int
    kind: str
    """The exception's class, if the rank could record it."""
    message: str
    trace: str
    time: float

    @property
    def is_cause(self) -> bool:
        """Whether this rank failed by itself, and not because another one did."""
        return self.kind != "PeerLost" and self.code != -signal.SIGTERM

    @property
    def is_lost(self) -> bool:
        return self.code < 0 and self.code != -signal.SIGTERM

    def summary(self) -> str:
        return self.message.splitlines()[0] if self.message else _describe_exit(self.code)


def read_failures(failures: Mapping[int, ProcessFailure], ranks: int, folder: Path) -> ExitReport:
    """One report for all ranks: the one that failed by itself first, with its own message."""
    first, *others = sorted(
        (_read(rank, failure) for rank, failure in failures.items()),
        key=lambda failure: (not failure.is_cause, failure.time),
    )
    if first.kind == "Stopped":
        return ExitReport(Stopped(first.message), first.message, ())
    known = getattr(errors, first.kind, None)
    log = folder.parent / "logs" / f"rank-{first.rank}.log"
    failed = "failed" if first.is_cause else "ended because of another rank"
    lines = [
        f"rank {first.rank} on {socket.gethostname()} (pid {first.pid}) {failed}; its log: {log}; "
        f"output of the ranks: {folder}",
        first.message if known is not None else first.trace.rstrip() or _describe_exit(first.code),
    ]
    lines += [f"rank {other.rank} (pid {other.pid}): {other.summary()}" for other in others]
    ended = sorted(set(range(ranks)) - set(failures)) if len(failures) <= ranks else []
    lines += [f"rank {rank}: ended by the launcher" for rank in ended]
    error = RankFailed("\n".join(lines), 1 if known is None else known.exit_code)
    headline = f"rank {first.rank} (pid {first.pid}): {first.summary()}"
    return ExitReport(error, headline, tuple(f.rank for f in (first, *others) if f.is_lost))


def _read(rank: int, failure: ProcessFailure) -> _Failure:
    kind, message, trace = "", "", ""
    if failure.error_file != "<N/A>":
        kind, message, trace = read_error(failure.error_file_data)
    return _Failure(
        rank, failure.pid, failure.exitcode, kind, message, trace, float(failure.timestamp)
    )


def read_error(document: Any) -> tuple[str, str, str]:
    """The exception's class, its message and its traceback, from a rank's error file."""
    if not isinstance(document, dict):
        return "", "", ""
    error = document.get("message", {})
    if isinstance(error, str):
        error = json.loads(error) if error.startswith("{") else {"message": error}
    kind, _, message = str(error.get("message", "")).partition(": ")
    return kind, message, str(error.get("extraInfo", {}).get("py_callstack", ""))


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code} and left no traceback"
