"""Stands in for a command where a shell looks for one: has a server fork it, and ends as it does.

    python -IS stand_in.py SERVER (samestep | torchrun | python) ARGUMENTS

Signals are handed on. SERVER is the path of the server's socket.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.preloaded.command_lines import is_known
from tests.preloaded.requests import Request, ignored_signals, receive_number, send

_MODULES = {"samestep": ["-m", "samestep"], "torchrun": ["-m", "torch.distributed.run"]}


def main() -> None:
    server, name, *words = sys.argv[1:]
    argv = [sys.executable, *_MODULES.get(name, []), *words]
    if not is_known(argv):
        os.execv(sys.executable, argv)
    request = Request(argv, dict(os.environ), str(Path.cwd()), [0, 1, 2], False, ignored_signals())
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(server)
        send(channel, request, [0, 1, 2])
        process = receive_number(channel)
        for number in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGQUIT"):
            signal.signal(getattr(signal, number), lambda number, frame: os.kill(process, number))
        code = receive_number(channel)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


main()
