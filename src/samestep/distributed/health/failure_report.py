"""The report of a rank to its launcher: that it failed, and why; or that its run is over.

To `samestep launch` by a pipe, which works where no file can be written; to torchrun's agent by
the file in which it looks.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from samestep.environment.variables import error_file, process_environment, report_pipe
from samestep.errors import RankHung
from samestep.tracebacks import format_error

_LONGEST = 24_000
"""Characters of a message or trace."""
_MOST_BYTES = 60_000
"""What a pipe holds until somebody reads it."""
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class FailureReport:
    """A rank's account of a failure. An empty kind: there was none, its run is over."""

    kind: str = ""
    """The exception's class."""
    message: str = ""
    trace: str = ""
    ranks: tuple[int, ...] = ()
    """The ranks that it is about, if that is not the one which reports it."""
    time: float = 0.0

    @classmethod
    def of(cls, error: BaseException) -> FailureReport:
        trace = format_error(error)
        ranks = error.ranks if isinstance(error, RankHung) else ()
        kind, message = type(error).__name__, str(error)
        return cls(kind, message[:_LONGEST], trace[-_LONGEST:], ranks, time.time())

    @classmethod
    def read(cls, line: bytes) -> FailureReport:
        document = json.loads(line)
        return cls(**{**document, "ranks": tuple(document["ranks"])})


def report_failure(error: BaseException) -> None:
    """Report this rank's exception to whatever started it; must work on a full disk."""
    _send(FailureReport.of(error))
    if error_file(process_environment()):
        # On a full disk torchrun sees the exit code only; our own launcher has read the pipe.
        with suppress(OSError):
            handler = get_error_handler()
            handler.initialize()
            handler.record_exception(error)


def report_end() -> None:
    """Report that this rank's run is over: an exit code of 0 alone might be anybody's."""
    _send(FailureReport(time=time.time()))


def _send(report: FailureReport) -> None:
    pipe = report_pipe(process_environment())
    if pipe is None:
        return
    line = json.dumps(asdict(report)).encode() + b"\n"
    while len(line) > _MOST_BYTES:  # escapes are longer than characters
        half = len(report.message) // 2, len(report.trace) // 2
        report = replace(report, message=report.message[: half[0]], trace=report.trace[half[1] :])
        line = json.dumps(asdict(report)).encode() + b"\n"
    # A launcher that is gone, or does not read, must not keep this rank from ending.
    with _one_at_a_time, suppress(OSError):
        os.write(pipe, line)
