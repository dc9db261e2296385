"""Servers inside other namespaces, for the hosts of `tests.cluster`."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

SERVE_INSIDE = "serve inside"
"""The command of a request for a server on a host, followed by a process id of the host."""

_NAMESPACES = ("ipc", "uts", "net", "mnt", "pid")


def enter_namespaces(process: int) -> None:
    """Go on in a process that has the network, name, files and process table of another.

    Only the children of a process can have another process table: this process ends.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # All opened first: the last but one changes what /proc is.
    files = [os.open(Path(f"/proc/{process}/ns/{name}"), os.O_RDONLY) for name in _NAMESPACES]
    for file in files:
        if libc.setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns: a namespace of a host cannot be entered")
        os.close(file)
    if os.fork():
        os._exit(0)
