"""Checks that need several ranks: every rank calls each, and gets the same findings."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from samestep.check.machine.findings import Finding, Place, note, ok, spans
from samestep.distributed.context import RunContext
from samestep.distributed.probe import Reduced, try_all_reduce
from samestep.report.format import format_bytes, format_seconds

_SKEW_ALLOWED = 1.0
_SECONDS_TO_SEE_A_FILE = 5.0
_GIGABIT = 125e6
"""Bytes per second of the slowest network that machines are still joined by."""

Places = Sequence[Place]


def try_ranks(context: RunContext, places: Places, folder: Path) -> list[Finding]:
    """Return all checks, in one order on all ranks."""
    return [
        check_clocks(read_clocks(context), places),
        *share_folder(context, places, folder),
        *check_all_reduce(try_all_reduce(context.collectives, context.device), places),
    ]


Clock = tuple[float, float]
"""A rank's time of day, and for how long it had waited for the others just before."""


def read_clocks(context: RunContext, times: int = 5) -> list[list[Clock]]:
    """Return every rank's clock, read when a barrier releases the ranks, a few times."""
    rounds: list[list[Clock]] = []
    for _ in range(times):
        start = time.perf_counter()
        context.barrier()
        now = time.time()
        rounds.append(context.gather((now, time.perf_counter() - start)))
    return rounds


def check_clocks(rounds: Sequence[Sequence[Clock]], places: Places) -> Finding:
    """Return whether the clocks agree, by the round in which ranks waited least for each other."""
    check = "clocks"
    best = min(rounds, key=lambda clocks: max(waited for _, waited in clocks))
    doubt = max(waited for _, waited in best)
    times = [now for now, _ in best]
    skew = max(times) - min(times)
    if skew - doubt <= _SKEW_ALLOWED:
        return ok(check, f"within {format_seconds(skew)}, measured by an exchange of {format_seconds(doubt)}")
    middle = sorted(times)[len(times) // 2]
    odd = tuple(r for r, now in enumerate(times) if abs(now - middle) > _SKEW_ALLOWED)
    hosts = tuple(sorted({places[rank].host for rank in odd}))
    return Finding(
        check,
        "warning",
        f"{skew:.1f} s apart, by up to {max(abs(t - middle) for t in times):.1f} s on ranks {spans(odd)}",
        "logs of different ranks cannot be put in one order, and shared file systems mistake new files for old ones",
        "run chrony or ntpd on these machines",
        ranks=odd,
        hosts=hosts,
    )


def share_folder(context: RunContext, places: Places, folder: Path) -> list[Finding]:
    """Rank 0 writes and renames a file in the run's folder, as a checkpoint is written."""
    name, text = f".samestep-doctor-{uuid.uuid4().hex[:12]}", uuid.uuid4().hex
    made: list[Path] = []
    refusal = ""
    if context.is_main:
        try:
            made = _make(folder)
            (folder / f"{name}.tmp").write_text(text, encoding="utf-8")
            os.replace(folder / f"{name}.tmp", folder / name)
        except OSError as error:
            refusal = error.strerror or str(error)
    name, text, refusal, where = context.broadcast((name, text, refusal, str(folder)))
    seen = None if refusal else _wait_for(folder / name, text)
    waits = context.gather(seen)
    left = ""
    if context.is_main:
        left = _remove(folder, name, made)
    left = context.broadcast(left)
    found = [check_sharing(where, waits, places, refusal)]
    if left:
        found.append(note("shared folder", left, "the check should leave nothing", "remove it"))
    return found


def _make(folder: Path) -> list[Path]:
    """Make the folder; returns which folders are new, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _wait_for(path: Path, text: str) -> float | None:
    """Seconds until this rank saw the file with its content; None if it did not."""
    start = time.perf_counter()
    while time.perf_counter() - start < _SECONDS_TO_SEE_A_FILE:
        if _holds(path, text):
            return time.perf_counter() - start
        time.sleep(0.05)
    return None


def _holds(path: Path, text: str) -> bool:
    try:
        # Network file systems answer from their cache; listing the folder makes them look again.
        there = any(found.name == path.name for found in path.parent.iterdir())
        return there and path.read_text(encoding="utf-8") == text
    except OSError:
        return False


def _remove(folder: Path, name: str, made: Sequence[Path]) -> str:
    """Restore the folder; returns what could not be removed."""
    try:
        for path in (folder / f"{name}.tmp", folder / name):
            path.unlink(missing_ok=True)
        for path in made:
            if path.exists() and not any(path.iterdir()):
                path.rmdir()
    except OSError as error:
        return f"left behind in {folder}: {error.strerror or error}"
    return ""


def check_sharing(folder: str, waits: Sequence[float | None], places: Places, refusal: str) -> Finding:
    """Return whether every rank saw rank 0's file; `waits` are the seconds it took, by rank."""
    check = "shared folder"
    if refusal:
        return Finding(
            check,
            "error",
            f"rank 0 cannot write to {folder}: {refusal}",
            "it writes the checkpoints there",
            "set run_dir to a folder that it may write to",
            ranks=(0,),
            hosts=(places[0].host,),
        )
    blind = tuple(rank for rank, waited in enumerate(waits) if waited is None)
    if blind:
        hosts = tuple(sorted({places[rank].host for rank in blind}))
        return Finding(
            check,
            "error",
            f"rank 0's file in {folder} was not seen by ranks {spans(blind)} on "
            f"{', '.join(hosts)} within {_SECONDS_TO_SEE_A_FILE:g} s",
            "a run that resumes from a checkpoint needs it on every rank: these ranks would not find it",
            "set run_dir to a folder on a file system that all machines share, by the same path",
            ranks=blind,
            hosts=hosts,
        )
    slowest = max(waited for waited in waits if waited is not None)
    return ok(check, f"all ranks see what rank 0 writes to {folder}, after {format_seconds(slowest)}")


def check_all_reduce(results: Sequence[Reduced], places: Places) -> list[Finding]:
    """Return whether sums are right, and a row of time and bandwidth per size."""
    found = []
    for result in results:
        size = format_bytes(result.size)
        speed = f"{format_seconds(result.seconds)}, {format_bytes(result.bus_bytes)}/s per rank"
        if result.wrong:
            hosts = tuple(sorted({places[rank].host for rank in result.wrong}))
            found.append(
                Finding(
                    "all-reduce",
                    "error",
                    f"{size}: a wrong sum on ranks {spans(result.wrong)} ({speed})",
                    "gradients would be silently wrong",
                    "compare torch and driver versions; for nccl try NCCL_P2P_DISABLE=1 and "
                    "NCCL_IB_DISABLE=1 to find the transport that is broken",
                    ranks=result.wrong,
                    hosts=hosts,
                )
            )
        else:
            found.append(ok("all-reduce", f"{size}: right, {speed}"))
    largest = results[-1]
    if len({place.host for place in places}) > 1 and largest.bus_bytes < 1.2 * _GIGABIT:
        found.append(
            note(
                "all-reduce",
                f"{format_bytes(largest.bus_bytes)}/s between machines at {format_bytes(largest.size)}",
                "that is what a 1 Gbit network gives: gradients of 100 million parameters take seconds a step",
                "if there is a faster network, choose its interface with GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME",
            )
        )
    return found
