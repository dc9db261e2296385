"""A lock on a directory of ours: the kernel releases it when its process ends, however it ends."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

from filelock import FileLock, Timeout

from samestep.checkpoint.ownership import naming_errors
from samestep.errors import RunDirError, TextError
from samestep.foreign.files import read_text


class DirectoryLock:
    """Held until `release`, or until this process is gone.

    Args:
        folder: The directory, which exists.
        name: The lock's file in it, which names the process that holds it.
        what: What is locked, for the message.
        advice: What to do if another process holds it.

    Raises:
        RunDirError: if another process, which the message names, holds it.
    """

    def __init__(self, folder: Path, name: str, what: str, advice: str) -> None:
        path = folder / name
        with naming_errors(folder):
            path.open("a").close()
        # A soft lock would outlive a killed process: without flock there is no lock at all.
        self._lock = FileLock(path, fallback_to_soft=False, thread_local=False)
        try:
            # filelock closes the file in forked loader workers, which may outlive this process.
            self._lock.acquire(blocking=False)
        except Timeout:
            holder = _holder(path) or "another process"
            raise RunDirError(f"{what} is in use by {holder}. {advice}") from None
        except OSError:
            return  # this file system has no locks: two users of one directory are not detected
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        with naming_errors(folder):
            path.write_text(
                f"process {os.getpid()} on {socket.gethostname()} since {since}\n", encoding="utf-8"
            )

    def release(self) -> None:
        """Let another process use the directory. Safe to call twice."""
        self._lock.release()


def is_gone(holder: str) -> bool:
    """Whether the process that a lock's file names is known to have ended."""
    found = re.match(r"process ([0-9]{1,9}) on (\S+) since", holder)
    if found is None or found[2] != socket.gethostname():
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's
        return False
    return False


def _holder(path: Path) -> str:
    try:
        return read_text(path, 1000).strip()
    except TextError:
        return ""
