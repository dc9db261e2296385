"""This process, where a server of warm processes forked it: what it is, and how it ends."""

from __future__ import annotations

import atexit
import fcntl
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from samestep.environment.interpreter import interpreter_words
from samestep.environment.variables import replace_environment
from samestep.launch.forkserver.requests import ForkRequest, set_process_title

if TYPE_CHECKING:
    from samestep.launch.forkserver.client import ForkClient

_READ_LATER = (
    "CUDA_VISIBLE_DEVICES", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
    "RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "WORLD_SIZE",
)  # fmt: skip
"""Variables that nothing reads while torch is imported; for the threads see `needs_threads`."""
_OURS = ("SAMESTEP_", "TORCHELASTIC_")


@dataclass(frozen=True)
class Imported:
    """The state of a server when it imported torch."""

    environment: Mapping[str, str]
    threads: int
    """Threads of the libraries that read this only when they are loaded."""
    exported: Mapping[str, str]
    """Variables that what it imported has set."""

    def differs(self, environment: Mapping[str, str]) -> bool:
        """Return whether a process with other variables could have imported something else."""
        after = {**self.environment, **self.exported}
        return any(
            environment.get(name) not in (self.environment.get(name), after.get(name))
            for name in {*after, *environment} - {*_READ_LATER}
            if not name.startswith(_OURS)
        )


@dataclass(frozen=True)
class ForkedInfo:
    """What a process that was forked knows of its start."""

    request: ForkRequest
    imported: Imported
    forks: ForkClient | None = None
    """Where a launcher has its ranks forked."""

    def needs_threads(self, threads: int) -> None:
        """Start again, cold, if libraries that are imported already compute with another number.

        Other threads can be other bits. `torch.set_num_threads` does not reach all libraries.
        """
        if threads != self.imported.threads:
            exec_cold(self.request)


FORKED: ContextVar[ForkedInfo | None] = ContextVar("FORKED", default=None)
"""What this process is, if it was forked."""


def exec_cold(request: ForkRequest) -> NoReturn:
    """Go on as a new interpreter: the same process, with the same files and the same parent."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    argv = [sys.executable, *interpreter_words(), *request.words]
    os.execve(sys.executable, argv, dict(request.environment))


def become_request(request: ForkRequest, files: Sequence[int], imported: Imported) -> None:
    """Be what a process started for the request would be, when it has imported torch."""
    os.setsid()
    take_files(dict(zip(request.numbers, files, strict=True)))
    if imported.differs(request.environment):
        exec_cold(request)
    replace_environment({**request.environment, **imported.exported})
    # A process of its own draws its own numbers where nobody sets a seed.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    tempfile.tempdir = None  # found by its own TMPDIR
    set_process_title([sys.executable, *interpreter_words(), *request.words])


def take_files(files: Mapping[int, int]) -> None:
    """Have each file under its number, and no other that was open in the server."""
    above = max(2, *files) + 1
    moved = {number: fcntl.fcntl(file, fcntl.F_DUPFD, above) for number, file in files.items()}
    for number, file in moved.items():
        os.dup2(file, number)
    for path in list(Path("/proc/self/fd").iterdir()):
        # The listing's own is there no more.
        if int(path.name) > 2 and int(path.name) not in files and path.is_symlink():
            os.close(int(path.name))


def run_and_leave(run: Callable[[Sequence[str]], object], words: Sequence[str]) -> NoReturn:
    """Run a command, and end as an interpreter would."""
    sys.argv = [sys.argv[0], *words]
    code = 0
    try:
        run(words)
    except BaseException as error:
        code = exit_code_of(error)
    exit_process(code)


def exit_code_of(error: BaseException) -> int:
    """Print what the interpreter prints at its end, and return its exit code."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def exit_process(code: int) -> NoReturn:
    """End without taking every module apart: that would copy all memory shared with the server."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)
