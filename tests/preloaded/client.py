"""The server of this process, started when it is first needed."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.preloaded.popen import fork_instead
from tests.preloaded.title import PADDING

ROOT = Path(__file__).parents[2]


class Server:
    """A process that forks commands for this one, and for stand-ins on a shell's PATH."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="samestep-preloaded-"))
        self.channel, theirs = socket.socketpair()
        path = self.folder / "socket"
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            files = [theirs.fileno(), listener.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.preloaded.server", *map(str, files), PADDING],
                cwd=ROOT, env=environment(), pass_fds=files,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        self.programs = self.folder / "bin"
        self.programs.mkdir()
        for name in ("samestep", "torchrun", "python"):
            self._write_stand_in(self.programs / name, path)

    def _write_stand_in(self, program: Path, socket_path: Path) -> None:
        stand_in = Path(__file__).with_name("stand_in.py")
        program.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -IS "{stand_in}" "{socket_path}" {program.name} "$@"\n'
        )
        program.chmod(0o755)

    def close(self) -> None:
        self.channel.close()
        self._process.wait()
        shutil.rmtree(self.folder)


@functools.cache
def server() -> Server:
    """The one of this process; it ends with it."""
    started = Server()
    atexit.register(started.close)
    return started


def environment() -> dict[str, str]:
    """Of the commands of tests: they find the tests' own modules, and use one thread."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` whose process the server forks."""

    def _execute_child(self, *arguments: Any) -> None:
        if not fork_instead(self, server().channel, arguments):
            raise ValueError(f"the server cannot run {self.args}")
