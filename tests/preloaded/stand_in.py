"""Stands in for a command where a shell looks for one: has a server fork it, and ends as it does.

    python -IS stand_in.py SERVERS (samestep | torchrun | python) ARGUMENTS

Signals are passed on to the command. SERVERS is a folder with a socket for each host.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.preloaded.command_lines import is_known
from tests.preloaded.requests import Request, ignored_signals, receive_number, send

_MODULES = {"samestep": ["-m", "samestep"], "torchrun": ["-m", "torch.distributed.run"]}
_PASSED_ON = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT}


def main() -> None:
    servers, name, *words = sys.argv[1:]
    argv = [sys.executable, *_MODULES.get(name, []), *words]
    ignored = ignored_signals()
    # What comes before there is a process to pass it on to waits.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    with socket.socket(socket.AF_UNIX) as channel:
        if not is_known(argv) or channel.connect_ex(f"{servers}/{socket.gethostname()}"):
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.execv(sys.executable, argv)
        request = Request(argv, dict(os.environ), str(Path.cwd()), [0, 1, 2], False, ignored)
        send(channel, request, [0, 1, 2])
        process = receive_number(channel)

        def pass_on(number: int, frame: object) -> None:
            with suppress(ProcessLookupError):  # it was faster, and its end is being reported
                os.kill(process, number)

        for number in _PASSED_ON:
            signal.signal(number, pass_on)
        # A signal just before a blocking read would not interrupt it, and wait for its end to be passed on.
        woken, waker = socket.socketpair()
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno())
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        while channel not in select.select([channel, woken], [], [])[0]:
            woken.recv(64)
        code = receive_number(channel)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


main()
