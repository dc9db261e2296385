"""What wakes a sweep's process: the end of a run, or a question of one on this machine."""

from __future__ import annotations

import os
import select
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from samestep.environment.variables import wake_variables


class Events:
    """A socket that runs send a byte to, and the ends of processes."""

    def __init__(self) -> None:
        # Not in the sweep's directory: the path of such a socket has at most 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="samestep-"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(self._folder / "wake"))
        self._ends: dict[int, int] = {}
        """A file for each process, which can be read once that has ended."""

    @property
    def variables(self) -> dict[str, str]:
        """What tells runs where to send it."""
        return wake_variables(self._folder / "wake")

    def watch(self, pid: int) -> None:
        """Wake up when this process ends, where the system can tell: on Linux."""
        with suppress(AttributeError, OSError):
            self._ends[pid] = os.pidfd_open(pid)

    def forget(self, pid: int) -> None:
        """The process has ended."""
        if pid in self._ends:
            os.close(self._ends.pop(pid))

    def wait(self, seconds: float) -> None:
        """Until something happens, but no longer than this."""
        files = [self._socket.fileno(), *self._ends.values()]
        select.select(files, [], [], seconds)
        with suppress(BlockingIOError):
            while True:
                self._socket.recv(64)

    def close(self) -> None:
        self._socket.close()
        for pid in list(self._ends):
            self.forget(pid)
        shutil.rmtree(self._folder, ignore_errors=True)
