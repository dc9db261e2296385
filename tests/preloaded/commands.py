"""How a process that a server forked becomes a command."""

from __future__ import annotations

import io
import os
import random
import runpy
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import numpy as np

from samestep.launch.forkserver.forked import exit_code_of, exit_process, take_files
from tests.preloaded.command_lines import parse
from tests.preloaded.requests import Request
from tests.preloaded.title import set_title

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def become_request(request: Request, descriptors: list[int]) -> None:
    """Be what a process started for the request would be."""
    if request.new_session:
        os.setsid()
    take_files(dict(zip(request.files, descriptors, strict=True)))
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
        code = exit_code_of(error)
    exit_process(code)


def _open_stdout(unbuffered: bool) -> None:
    """As the interpreter does; of the other streams it is all the same to what they lead."""
    plain = open(1, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(
        plain, sys.stdout.encoding, sys.stdout.errors, line_buffering=os.isatty(1), write_through=unbuffered
    )
