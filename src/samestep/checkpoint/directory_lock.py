"""A lock on a directory of ours: the kernel releases it when its process ends, however it ends."""

from __future__ import annotations

import os
import re
import secrets
import socket
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from samestep.checkpoint.ownership import reraise_os_errors
from samestep.errors import RunDirError, TextError
from samestep.parsing.files import read_text

SECONDS_BETWEEN_BEATS = 5.0
SECONDS_TO_LIVE = 60.0
"""A holder whose last heartbeat is older than this is taken for gone."""


@dataclass(frozen=True)
class Holder:
    """The process that a lock's file names."""

    text: str
    """Its number, its host and since when, for messages."""
    age: float
    """Seconds since its last heartbeat, by the file system's clock."""

    @property
    def is_here(self) -> bool:
        """Return whether it is a process of this machine."""
        found = _PROCESS.match(self.text)
        return found is not None and found[2] == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Return whether it runs, as far as can be known from here."""
        return self.age < SECONDS_TO_LIVE and not is_gone(self.text)

    def words(self) -> str:
        """Return it for messages."""
        return f"{self.text}, whose last heartbeat was {self.age:.0f} s ago"


class DirectoryLock:
    """Held until `release`, or until this process is gone.

    Args:
        folder: The directory, which exists.
        name: The lock's file in it, which names the process that holds it.
        what: What is locked, for the message.
        advice: What to do if another process holds it.
        beats: Whether a thread touches the file while it is held. Then a process on another machine counts
            too, where the file system does not share its locks.

    Raises:
        RunDirError: if another process, which the message names, holds it.
    """

    def __init__(self, folder: Path, name: str, what: str, advice: str, *, beats: bool = False) -> None:
        path = folder / name
        self._path, self._what = path, what
        self._thread: threading.Thread | None = None
        with reraise_os_errors(folder):
            path.open("a").close()
        # A soft lock would outlive a killed process: without flock there is no lock at all.
        self._lock = FileLock(path, fallback_to_soft=False, thread_local=False)
        locked = True
        try:
            # filelock closes the file in forked loader workers, which may outlive this process.
            self._lock.acquire(blocking=False)
        except Timeout:
            holder = _first_line(path) or "another process"
            raise RunDirError(f"{what} is in use by {holder}. {advice}") from None
        except OSError:
            if not beats:
                return  # this file system has no locks: two users of one directory are not detected
            locked = False
        self.taken_from = holder_of(path) if beats else None
        """Who held it last, and has not released it."""
        if self.taken_from is not None:
            self._refuse_living(self.taken_from, locked, advice)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._text = f"process {os.getpid()} on {socket.gethostname()} since {since}\n"
        if beats:
            self._text += f"{secrets.token_hex(8)}\n"  # a process has its number again some day
        with reraise_os_errors(folder):
            path.write_text(self._text, encoding="utf-8")
        if beats:
            self._released = threading.Event()
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()

    def _refuse_living(self, holder: Holder, locked: bool, advice: str) -> None:
        # Of this machine's processes the kernel knows better, if it has locks here.
        if not holder.is_alive or (locked and holder.is_here):
            return
        self._lock.release()
        left = SECONDS_TO_LIVE - holder.age
        raise RunDirError(
            f"{self._what} is in use by {holder.words()}. {advice}. If its machine is gone, it can be taken "
            f"over {left:.0f} s from now"
        )

    def _beat(self) -> None:
        while not self._released.wait(SECONDS_BETWEEN_BEATS):
            # A full disk or a server that is away for a moment is no reason to end.
            with suppress(OSError):
                if self.is_ours():
                    os.utime(self._path)

    def is_ours(self) -> bool:
        """Return whether the file still names this process; raises an `OSError` if it cannot be read."""
        return self._path.read_text(encoding="utf-8") == self._text

    def refuse_lost(self) -> None:
        """Raise if another process has taken over, which this one had not heard of: it was suspended.

        Raises:
            RunDirError: naming that process.
        """
        try:
            if self.is_ours():
                return
        except OSError:
            return
        raise RunDirError(
            f"{self._what} was taken over by {_first_line(self._path)}, since this process had no heartbeat "
            f"for {SECONDS_TO_LIVE:.0f} s, as one that was suspended: it ends"
        )

    def release(self) -> None:
        """Let another process use the directory. Safe to call twice."""
        if self._thread is not None:
            self._released.set()
            self._thread.join()
            self._thread = None
            with suppress(OSError):  # a directory that is gone, or full, is nobody's either
                if self.is_ours():
                    self._path.write_text("", encoding="utf-8")
        self._lock.release()


def holder_of(path: Path) -> Holder | None:
    """Return who holds a lock with heartbeats, or has ended without releasing it; None if nobody has."""
    try:
        # Opened: a network file system looks at the file itself then, not at what it remembers of it.
        with path.open("rb") as file:
            beaten = os.fstat(file.fileno()).st_mtime
            text = _first_line(path)
    except OSError:
        return None
    return Holder(text, max(0.0, _now(path.parent) - beaten)) if text else None


def _now(folder: Path) -> float:
    """Return the time by the clock that stamps files in a directory, which may be a server's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b".")
            file.flush()
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # who may only read
        return time.time()


_PROCESS = re.compile(r"process ([0-9]{1,9}) on (\S+) since")


def is_gone(holder: str) -> bool:
    """Return whether the process that a lock's file names is known to have ended."""
    found = _PROCESS.match(holder)
    if found is None or found[2] != socket.gethostname():
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's
        return False
    return False


def _first_line(path: Path) -> str:
    try:
        return read_text(path, 1000).strip().partition("\n")[0]
    except TextError:
        return ""
