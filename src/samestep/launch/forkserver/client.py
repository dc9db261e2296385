"""Processes that a server forks for this one: like any that it started itself, but warm. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from samestep.environment.interpreter import interpreter_words
from samestep.environment.variables import process_environment, thread_variables
from samestep.errors import LaunchError
from samestep.launch.forkserver.requests import PADDING, ForkRequest, receive, send

_PR_SET_CHILD_SUBREAPER = 36


class ForkedProcess:
    """A forked child of this process, as `subprocess.Popen` would show it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


class ForkClient:
    """The channel to a server, which is a child of this process."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def start(self, words: Sequence[str], environment: Mapping[str, str], files: Mapping[int, int]) -> ForkedProcess:
        """Have a child of this process forked, which leads a session of its own.

        Args:
            files: This process's files that it gets, by the number that they have there.

        Raises:
            OSError, EOFError: if the server is gone.
        """
        request = ForkRequest(words, list(files), environment)
        _take_in_orphans(True)
        try:
            send(self._channel, request.texts(), list(files.values()))
            (number,), _ = receive(self._channel)
        finally:
            _take_in_orphans(False)
        return ForkedProcess(int(number))

    def is_ready(self) -> str:
        """Wait until the server has imported everything; why it offers no processes, if it does not."""
        (why,), _ = receive(self._channel)
        return why

    def close(self) -> None:
        self._channel.close()


def _take_in_orphans(whether: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl: orphans cannot be taken in")


class WarmServer:
    """A server as a process of its own, which begins to import at once and ends with this one.

    Args:
        threads: The threads of each run, which some libraries read when they are imported.
    """

    def __init__(self, task: Path, threads: int, output: Path) -> None:
        ours, theirs = socket.socketpair()
        words = [str(theirs.fileno()), str(task), str(threads), PADDING]
        argv = [sys.executable, *interpreter_words(), "warm", *words]
        with theirs, output.open("ab") as file:
            try:
                self._process = subprocess.Popen(
                    argv,
                    env={**process_environment(), **thread_variables(threads)},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                raise LaunchError(f"no process can be started: {error.strerror or error}") from None
        self._forks, self._why = ForkClient(ours), ""
        self._is_ready = False

    def why_not(self) -> str:
        """Return why no process can be forked; empty if they can. Waits until that is known."""
        if not self._is_ready:
            self._is_ready = True
            try:
                self._why = self._forks.is_ready()
            except (OSError, EOFError):
                self._why = f"the process that forks them ended with {self._process.wait()}"
        return self._why

    def start(self, words: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> ForkedProcess:
        """Have a command of ours forked; see `ForkClient.start`."""
        with Path(os.devnull).open("rb") as nothing:
            files = {0: nothing.fileno(), 1: output.fileno(), 2: output.fileno()}
            return self._forks.start(words, environment, files)

    def close(self) -> None:
        """End the server; what it forked is not touched."""
        self._forks.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # it may be importing
        self._process.wait()
