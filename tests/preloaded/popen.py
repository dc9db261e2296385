"""`subprocess.Popen` whose process is forked by a server."""

from __future__ import annotations

import ctypes
import inspect
import os
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

from tests.preloaded.command_lines import is_known
from tests.preloaded.requests import Request, ignored_signals, receive_number, send

_PR_SET_CHILD_SUBREAPER = 36
_PLAIN = subprocess.Popen._execute_child
_SIGNATURE = inspect.signature(_PLAIN)
_one_at_a_time = threading.Lock()


def fork_instead(process: Any, channel: socket.socket, arguments: tuple[Any, ...]) -> bool:
    """Do what `Popen._execute_child` does by asking a server; False for what it cannot run."""
    given = _SIGNATURE.bind(process, *arguments).arguments
    argv = given["args"]
    argv = [argv] if isinstance(argv, str) else [os.fspath(word) for word in argv]
    if given["shell"] or given["preexec_fn"] is not None or not is_known(argv):
        return False
    streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    files = {n: n if stream == -1 else stream for n, stream in enumerate(streams)}
    files |= {file: file for file in given["pass_fds"]}
    environment = os.environ if given["env"] is None else given["env"]
    request = Request(
        argv=argv,
        environment={os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()},
        folder=os.fspath(given["cwd"] or Path.cwd()),
        files=list(files),
        new_session=bool(given["start_new_session"]),
        ignored=ignored_signals(),
    )
    process.pid = fork_by(channel, request, list(files.values()))
    process._child_created = True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(given[name] for name in pipes))
    return True


def fork_by(channel: socket.socket, request: Request, files: list[int]) -> int:
    """Have a server, which is a child of this process, fork another child of this process."""
    with _one_at_a_time:
        # The server forks twice, and the process in between ends at once: its child then goes to
        # the nearest ancestor that takes in orphans.
        _take_in_orphans(True)
        try:
            send(channel, request, files)
            return receive_number(channel)
        finally:
            _take_in_orphans(False)


def _take_in_orphans(whether: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl: orphans cannot be taken in")


def fork_all(channel: socket.socket) -> None:
    """From now on, fork every command of this process that the server can run."""

    def execute_child(process: Any, *arguments: Any) -> None:
        if not fork_instead(process, channel, arguments):
            _PLAIN(process, *arguments)

    subprocess.Popen._execute_child = execute_child
