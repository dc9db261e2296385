"""Forks a process for each command that it is sent; see the package's docstring.

    python -m tests.preloaded.server CHANNEL LISTENER PADDING

CHANNEL and LISTENER are the numbers of sockets that it inherits: of its parent, and for programs
that stand in for a command. PADDING makes room for the command lines of its children.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from tests.preloaded.command_lines import starts_others
from tests.preloaded.commands import become_request, execute
from tests.preloaded.namespaces import SERVE_INSIDE, enter_namespaces
from tests.preloaded.popen import fork_all
from tests.preloaded.requests import Request, receive, send_number
from tests.preloaded.title import set_title

MODULES = (
    "matplotlib.backends.backend_agg",
    "sklearn.datasets",
    "tests.distributed.tasks",
    "torch._dynamo",
    "torch.distributed.launcher.api",
    "torch.utils.tensorboard",
    "torchmetrics.classification",
    "samestep.cli",
    "samestep.check.machine.run_checks",
    "samestep.models.export.export_run",
    "samestep.models.checkpoint_average",
    "samestep.models.predict",
    "samestep.launch.run.agent",
    "samestep.bench.tuning.lr_range_test",
    "samestep.bench.tuning.lr_report",
    "alembic.migration",
    "optuna.storages._rdb.models",
    "samestep.sweep.coordinator",
    "samestep.sweep.cross_validation",
    "samestep.train.train_once",
    "samestep.verify.report",
    "samestep.verify.verify",
    "tests.frozen",
)
"""What commands import, with what the first optimizer and the first metric of a process import."""

_FOR_THE_COMMAND = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


def main() -> None:
    channel, listener = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    for module in MODULES:
        importlib.import_module(module)
    request = serve(channel, listener)
    if request.argv[0] == SERVE_INSIDE:
        enter_namespaces(int(request.argv[1]))
        request = serve(None, socket.socket(fileno=request.files[-1]))
    while starts_others(request.argv):
        ours, theirs = socket.socketpair()
        if os.fork():
            theirs.close()
            fork_all(ours)
            break
        ours.close()
        _leave_streams()
        request = serve(theirs, None)
        # Closed already, and its number may be another file's: a launch of a sweep has servers of its own.
        theirs.detach()
    execute(request.argv)


def serve(channel: socket.socket | None, listener: socket.socket | None) -> Request:
    """Wait for requests until the channel is closed. Returns in a new process for each."""
    set_title("preloaded by samestep's tests")
    for number in _FOR_THE_COMMAND:  # of whose process group a server may be
        signal.signal(number, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([source for source in (channel, listener) if source], [], [])
        fork = _fork_for_parent if channel in ready else _fork_for_stand_in
        if (request := fork(ready[0])) is not None:
            return request
        _collect_ended()


def _fork_for_parent(channel: socket.socket) -> Request | None:
    """Fork a process and leave it to the one that this server belongs to; see `popen.fork_by`."""
    received = receive(channel)
    if received is None:
        os._exit(0)
    request, files = received
    ids_from, ids_to = os.pipe()
    adopted_from, adopted_to = os.pipe()
    between = os.fork()
    if not between:
        if child := os.fork():
            os.write(ids_to, str(child).encode())
            os._exit(0)
        os.close(adopted_to)
        os.read(adopted_from, 1)
        become_request(request, files)
        return request
    os.waitpid(between, 0)
    send_number(channel, int(os.read(ids_from, 32)))
    for file in (ids_from, ids_to, adopted_from, adopted_to, *files):
        os.close(file)
    return None


def _fork_for_stand_in(listener: socket.socket) -> Request | None:
    """Fork a process, and one that stays with it and reports its end to a stand-in."""
    connection, _ = listener.accept()
    if os.fork():
        connection.close()
        return None
    received = receive(connection)
    if received is None:
        os._exit(0)
    request, files = received
    child = os.fork()
    if not child:
        become_request(request, files)
        return request
    for file in files:
        os.close(file)
    send_number(connection, child)
    end = os.pidfd_open(child)
    ready, _, _ = select.select([end, connection], [], [])
    if end not in ready:  # the stand-in was killed
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with suppress(OSError):
        send_number(connection, os.waitstatus_to_exitcode(status))
    os._exit(0)


def _collect_ended() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            continue


def _leave_streams() -> None:
    """Not hold the command's pipes open."""
    with Path(os.devnull).open("r+b") as nothing:
        for number in range(3):
            os.dup2(nothing.fileno(), number)


if __name__ == "__main__":
    main()
