"""Commands in real processes, as a person would start, signal and kill them.

They are forked by a server that has torch imported (see `tests.preloaded`), unless a test says why
its command must be a process that starts from nothing: `cold="..."`.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.preloaded.client import POSSIBLE, ROOT, Popen, environment

TASKS = ROOT / "tests" / "distributed" / "tasks.py"


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "samestep", *map(str, arguments)]


def samestep(
    *arguments: str | Path, cwd: Path, seconds: float = 300, cold: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return run(command(*arguments), cwd=cwd, seconds=seconds, cold=cold)


def torchrun(
    *arguments: str | Path, cwd: Path, launcher: str = "torch.distributed.run", cold: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end on two ranks that torchrun starts."""
    start = [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node=2"]
    return run([*start, "-m", "samestep", *map(str, arguments)], cwd=cwd, cold=cold)


def run(
    argv: Sequence[str], *, cwd: Path, seconds: float = 300, cold: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run any Python program to its end."""
    given = {**environment(), **variables}
    with popen(argv, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cold=cold, env=given) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextmanager
def started(*arguments: str | Path, cwd: Path, cold: str = "", **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs on while the test does things to it."""
    process = popen(
        command(*arguments), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, cold=cold, env={**environment(), **variables},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def popen(argv: Sequence[str], *, cold: str = "", **options: Any) -> subprocess.Popen[str]:
    """Start any Python program."""
    kind = Popen if POSSIBLE and not cold else subprocess.Popen
    return kind(argv, text=True, **{"env": environment(), **options})


def wait_for(what: Callable[[], bool], seconds: float = 180) -> None:
    """Wait for something to happen; the seconds are for a machine that is busy with others."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def processes_of(folder: Path) -> list[int]:
    """Living processes whose command line names something in the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has just ended
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; not one that has ended and waits for its parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def write_config(path: Path, task: str = "Everything", **values: Any) -> Path:
    """Of a task of `tests.distributed.tasks`: a global batch of 32 in 8 lanes, one thread per rank."""
    distributed = {"threads_per_rank": 1, "timeout": 600, **values.pop("distributed", {})}
    config = {"task": f"{TASKS}:{task}", "global_batch": 32, "lanes": 8, **values, "distributed": distributed}
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def children_of(pid: int) -> list[int]:
    """The processes that a process started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def on_a_terminal(*words: Any, cwd: Path) -> tuple[int, str, str]:
    """The exit code, the output, and what was written to the terminal, which is standard error."""
    ours, theirs = pty.openpty()
    size = {"COLUMNS": "150", "LINES": "30", "TERM": "xterm"}
    with popen(
        command(*words), cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs,
        env={**environment(), **size},
    ) as process:  # fmt: skip
        os.close(theirs)
        shown = b""
        while True:
            try:
                found = os.read(ours, 65536)
            except OSError:  # Linux, when the other end is closed
                break
            if not found:  # macOS
                break
            shown += found
        assert process.stdout is not None
        output = process.stdout.read()
    os.close(ours)
    return process.returncode, output, shown.decode()
