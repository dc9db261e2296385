"""The server of this process, started when it is first needed."""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.preloaded.command_lines import STAND_IN
from tests.preloaded.namespaces import SERVE_INSIDE
from tests.preloaded.popen import fork_by, fork_instead
from tests.preloaded.requests import Request
from tests.preloaded.title import PADDING

ROOT = Path(__file__).parents[2]
POSSIBLE = sys.platform == "linux"
"""Elsewhere a process cannot be handed to another parent, and commands start as usual."""


class Server:
    """A process that forks commands for this one, and for stand-ins on a shell's PATH."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="samestep-preloaded-"))
        self.channel, theirs = socket.socketpair()
        with theirs, self._listen_for(socket.gethostname()) as listener:
            files = [theirs.fileno(), listener.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.preloaded.server", *map(str, files), PADDING],
                cwd=ROOT, env=environment(), pass_fds=files,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        self.python = Path(f"{self.folder}{STAND_IN}")
        self.programs = self.python.parent
        """For a shell's PATH."""
        self.programs.mkdir()
        for name in ("samestep", "torchrun", "python"):
            self._write_stand_in(self.programs / name)

    def serve_on(self, host: str, process: int) -> None:
        """Have stand-ins served on a host too, which is known by one of its processes.

        Where a host has no server, a stand-in is replaced by the interpreter itself.
        """
        (self.folder / host).unlink(missing_ok=True)
        with self._listen_for(host) as listener, Path(os.devnull).open("r+b") as nothing:
            request = Request(
                argv=[SERVE_INSIDE, str(process)], environment=environment(), folder=str(ROOT),
                files=[0, 1, 2, 3], new_session=True, ignored=[],
            )  # fmt: skip
            files = [*[nothing.fileno()] * 3, listener.fileno()]
            _, status = os.waitpid(fork_by(self.channel, request, files), 0)
        assert status == 0, f"there is no preloaded interpreter on {host}"

    def _listen_for(self, host: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.folder / host))
        listener.listen()
        return listener

    def _write_stand_in(self, program: Path) -> None:
        words = [sys.executable, "-IS", str(Path(__file__).with_name("stand_in.py"))]
        line = shlex.join([*words, str(self.folder), program.name])
        program.write_text(f'#!/bin/sh\nexec {line} "$@"\n')
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


def shell_path(cold: str = "") -> str:
    """A shell's PATH with the commands of this environment: forked, or for a reason the real ones."""
    programs = [Path(sys.executable).parent, os.environ["PATH"]]
    if POSSIBLE and not cold:
        programs.insert(0, server().programs)
    return os.pathsep.join(map(str, programs))


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` whose process the server forks."""

    def _execute_child(self, *arguments: Any) -> None:
        if not fork_instead(self, server().channel, arguments):
            raise ValueError(f"the server cannot run {self.args}")
