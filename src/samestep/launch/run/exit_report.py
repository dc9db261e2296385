"""Finds which rank failed by itself, and why, from how all ranks ended."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from samestep import errors
from samestep.distributed.health.failure_report import FailureReport
from samestep.errors import PeerLost, RankFailed, RankHung, SamestepError, Stopped, UserError
from samestep.launch.run.rank_processes import RankProcess


class ExitReport(Exception):
    """The end of a launch."""

    def __init__(self, error: SamestepError, headline: str, lost: tuple[int, ...]) -> None:
        super().__init__(headline)
        self.error = error
        """For the person who launched."""
        self.headline = headline
        self.lost = lost
        """Ranks that were killed or crashed, and may not come back."""

    @property
    def may_pass(self) -> bool:
        """Return whether a restart could succeed."""
        return not isinstance(self.error, Stopped) and self.error.exit_code != UserError.exit_code


def exit_report(ranks: Sequence[RankProcess], folder: Path, keeps_logs: bool = True) -> ExitReport:
    """One report for all ranks: what was recorded first, by whichever rank it was.

    A rank that was ended meanwhile may have recorded the cause before that.
    """
    first, *others = sorted((rank for rank in ranks if not rank.has_succeeded), key=_order)
    failure = first.failure or FailureReport()
    if failure.kind == Stopped.__name__:
        return ExitReport(Stopped(failure.message), failure.message, ())
    known = getattr(errors, failure.kind, None)
    message = failure.message if known is not None else failure.trace.rstrip()
    lines = [_headline(first, folder, keeps_logs), message or _describe_exit(first)]
    lines += [f"rank {other.rank} (pid {other.pid}): {_summary(other)}" for other in others]
    error = RankFailed("\n".join(lines), 1 if known is None else known.exit_code)
    headline = f"rank {_subject(first)}: {_summary(first)}"
    return ExitReport(error, headline, tuple(rank.rank for rank in ranks if _is_lost(rank)))


def after_signal(number: signal.Signals, ranks: Sequence[RankProcess]) -> Exception:
    """Return how the ranks ended after a signal that the launcher forwarded to them."""
    failures = [rank.failure for rank in sorted(ranks, key=_order) if rank.failure is not None]
    stopped = next((f for f in failures if f.kind == Stopped.__name__), None)
    if stopped is not None:
        return Stopped(stopped.message)
    if ranks and all(rank.has_succeeded for rank in ranks):
        return Stopped(f"stopped by {number.name} at the end of the run")
    cause = next((f for f in failures if f.kind != PeerLost.__name__), None)
    why = "" if cause is None else f": {cause.kind}: {cause.message}"
    return RankFailed(f"stopped by {number.name} before it could be saved{why}", 128 + number)


def _order(rank: RankProcess) -> tuple[bool, float]:
    failure = rank.failure
    return not _is_cause(rank), rank.ended if failure is None else failure.time


def _is_cause(rank: RankProcess) -> bool:
    """Return whether this rank failed by itself, and not because another one did."""
    if rank.failure is not None:
        return rank.failure.kind != PeerLost.__name__
    return not rank.stopped_by_us


def _is_lost(rank: RankProcess) -> bool:
    return rank.code is not None and rank.code < 0 and not rank.stopped_by_us


def _headline(first: RankProcess, folder: Path, keeps_logs: bool) -> str:
    """Return which rank it is about, and where to look."""
    host, failure = socket.gethostname(), first.failure
    if failure is not None and failure.kind == RankHung.__name__ and failure.ranks:
        hung = ", ".join(map(str, failure.ranks))
        what = f"rank{'s' * (len(failure.ranks) > 1)} {hung} hung, as rank {first.rank} on {host} found"
        log = folder.parent / "logs" / f"rank-{failure.ranks[0]}.log"
    else:
        failed = "failed" if _is_cause(first) else "ended because of another rank"
        what = f"rank {first.rank} on {host} (pid {first.pid}) {failed}"
        log = folder.parent / "logs" / f"rank-{first.rank}.log"
    logged = f"its log: {log}; " if keeps_logs else ""
    return f"{what}; {logged}output of the ranks: {folder}"


def _subject(first: RankProcess) -> str:
    failure = first.failure
    if failure is not None and failure.kind == RankHung.__name__ and failure.ranks:
        return ", ".join(map(str, failure.ranks))
    return f"{first.rank} (pid {first.pid})"


def _summary(rank: RankProcess) -> str:
    message = "" if rank.failure is None else rank.failure.message
    return message.splitlines()[0] if message else _describe_exit(rank)


def _describe_exit(rank: RankProcess) -> str:
    code = rank.code
    if rank.stopped_by_us:
        return "ended by the launcher"
    if code is not None and code < 0:
        known = -code in list(signal.Signals)
        return f"ended by {signal.Signals(-code).name if known else f'signal {-code}'}"
    if code == 0:
        return "ended with exit code 0 before its run was over: something called os._exit"
    return f"ended with exit code {code} and left no traceback"
