"""How a process that a server forked becomes a command."""

from __future__ import annotations

import atexit
import fcntl
import io
import os
import random
import runpy
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import NoReturn

import numpy as np

from tests.preloaded.command_lines import parse
from tests.preloaded.requests import Request
from tests.preloaded.title import set_title

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def become(request: Request, descriptors: list[int]) -> None:
    """Be what a process started for the request would be."""
    if request.new_session:
        os.setsid()
    _take_files(dict(zip(request.files, descriptors, strict=True)))
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    _take_signals(request.ignored)
    # A process of its own draws its own numbers where nobody sets a seed.
    random.seed()
    np.random.seed()
    # And finds the folder for temporary files by its own TMPDIR.
    tempfile.tempdir = None
    set_title(*request.argv)


def _take_files(files: dict[int, int]) -> None:
    """Have each file under its number, and no other that was open in the server."""
    out_of_the_way = max([2, *files]) + 1
    moved = {number: fcntl.fcntl(file, fcntl.F_DUPFD, out_of_the_way) for number, file in files.items()}
    for number, file in moved.items():
        os.dup2(file, number)
    for path in Path("/proc/self/fd").iterdir():
        if int(path.name) > 2 and int(path.name) not in files:
            _close(int(path.name))


def _close(file: int) -> None:
    try:
        os.close(file)
    except OSError:
        return  # the listing's own


def _take_signals(ignored: list[int]) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if number in ignored:
            signal.signal(number, signal.SIG_IGN)
        elif number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        elif number not in _IGNORED_BY_PYTHON:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def execute(argv: list[str]) -> NoReturn:
    """Run a command and end as an interpreter would."""
    unbuffered, module, words = parse(argv)
    _open_stdout(unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.orig_argv = argv
    sys.argv = words if module is None else [module, *words]
    sys.path[0] = str(Path.cwd() if module is not None else Path(words[0]).resolve().parent)
    code = 0
    try:
        if module is None:
            runpy.run_path(words[0], run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except BaseException as error:
        code = _code_of(error)
    _leave(code)


def _open_stdout(unbuffered: bool) -> None:
    """As the interpreter does; of the other streams it is all the same to what they lead."""
    plain = open(1, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(
        plain, sys.stdout.encoding, sys.stdout.errors, line_buffering=os.isatty(1), write_through=unbuffered
    )


def _code_of(error: BaseException) -> int:
    """What the interpreter ends with, after it has printed what it prints."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _leave(code: int) -> NoReturn:
    """End without taking every module apart: that copies all memory shared with the server."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)
