"""All processes that this one has started: after a fault, nothing of a run may be left among them.

On Linux this process adopts what its children leave behind, so that nobody can get away: neither by
the end of its parent, nor in a session or an environment of its own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_LISTENS = "0A"
POSSIBLE = sys.platform == "linux"


class LeftBehind(AssertionError):
    """Processes or sockets of a run are there after its end."""


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """In this block, processes whose parent ends become this one's children."""
    _adopt(1)
    try:
        yield
    finally:
        _adopt(0)


def _adopt(orphans: int) -> None:
    if POSSIBLE:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, orphans, 0, 0, 0)


def members() -> dict[int, str]:
    """The living descendants of this process, with their command lines."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat") if POSSIBLE else ():
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it has just ended
        if state not in "ZX":
            parents[int(path.parent.name)] = int(parent)
    found: dict[int, str] = {}
    newest = {os.getpid()}
    while newest := {pid for pid, parent in parents.items() if parent in newest}:
        found |= {pid: _command(pid) for pid in newest}
    return found


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "it has just ended"
    return b" ".join(words).decode(errors="replace").strip()[:200]


def listening(pids: set[int]) -> set[str]:
    """The TCP sockets on which these processes listen, as `ADDRESS:PORT` in hexadecimal."""
    places: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            words = line.split()
            if words[3] == _LISTENS:
                places[f"socket:[{words[9]}]"] = words[1]
    found = set()
    for pid in pids:
        try:
            files = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        found |= {places[file] for file in files if file in places}
    return found


def _kill_all_but(before: dict[int, str]) -> None:
    """After a failure: nobody waits for them any more, and we could not end either."""
    for pid in members().keys() - before.keys():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def nothing_left(what: str, seconds: float) -> Iterator[None]:
    """After this block the process table, and who listens, are as before it, within some seconds."""
    before = members()
    served = listening({os.getpid(), *before})
    try:
        yield
    except BaseException:
        _kill_all_but(before)
        raise
    deadline = time.monotonic() + seconds
    while new := {pid: text for pid, text in members().items() if pid not in before}:
        if time.monotonic() > deadline:
            shown = "; ".join(f"{pid} ({text})" for pid, text in new.items())
            sockets = listening(set(new))
            _kill_all_but(before)
            raise LeftBehind(f"{what} left processes after {seconds:g} s: {shown}; {sockets or ''}")
        time.sleep(0.05)
    sockets = listening({os.getpid(), *members()}) - served
    if sockets:
        raise LeftBehind(f"{what} left sockets that listen: {', '.join(sorted(sockets))}")
