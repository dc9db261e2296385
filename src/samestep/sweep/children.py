"""Commands of ours as child processes, which end with this one, however it ends.

Where a task allows it, they are forked from a process that has imported what they need.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from samestep.config import Config
from samestep.config.task_file import look_at_task
from samestep.distributed.signals import SignalForwarder
from samestep.environment.interpreter import interpreter_words
from samestep.environment.variables import ending_variables, process_environment
from samestep.errors import LaunchError, Stopped
from samestep.launch.forkserver.client import ForkedProcess, WarmServer
from samestep.launch.run.orphans import Reaper
from samestep.launch.run.reaper import kill_group
from samestep.parsing.files import read_lines
from samestep.parsing.limits import short

PAUSE = 0.05
"""Seconds between two looks at whether a child has ended, or asks something."""
_SECONDS_TO_END = 30.0
"""How long they get if this process fails."""
_SECONDS_TO_SAVE = 300.0
"""How long runs get to save when they are stopped, or left behind."""


@dataclass
class Child:
    """One command of ours, in a process of its own."""

    name: str
    process: subprocess.Popen[bytes] | ForkedProcess
    output: Path
    """What it prints."""
    code: int | None = None
    """Its exit code, or minus the signal that ended it; None while it runs."""

    def last_words(self) -> str:
        """Return what it printed last, which in a command that failed is the reason."""
        lines = [line.strip() for line in read_lines(self.output) if line.strip()]
        said = [line for line in lines if line.startswith("samestep: ")] or lines
        return short(said[-1].removeprefix("samestep: "), 500) if said else ""

    def ending(self) -> str:
        """Return how it ended, in words."""
        if self.code is not None and self.code < 0:
            known = -self.code in list(signal.Signals)
            name = signal.Signals(-self.code).name if known else f"signal {-self.code}"
            often = ", which is how Linux ends what takes too much memory"
            return f"ended by {name}{often if -self.code == signal.SIGKILL else ''}"
        return self.last_words() or f"ended with exit code {self.code}"


class Children:
    """While entered, commands can be started; a stop signal is forwarded to them, and they save.

    If this process is killed, a process that outlives it ends them.
    """

    def __init__(self) -> None:
        self._running: list[Child] = []
        self._server: WarmServer | None = None
        self._report: Callable[[str], None] = print
        self._signals = SignalForwarder(self._forward, self.kill)

    def __enter__(self) -> Children:
        self._reaper = Reaper(_SECONDS_TO_SAVE)
        self._signals.__enter__()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._forward(signal.SIGTERM)
            self._wait_for_all(_SECONDS_TO_END)
            self.kill()
            self._wait_for_all(_SECONDS_TO_END)
        finally:
            self._signals.__exit__(kind, error, trace)
            self._reaper.close()

    def start(self, name: str, words: Sequence[str], output: Path, variables: Mapping[str, str] | None = None) -> Child:
        """Start a command of ours.

        Args:
            words: The command and its arguments, as after `samestep`.
            output: Gets what it prints, after what is there.
        """
        # By itself too: this process may be killed before the reaper knows of it.
        environ = {**process_environment(), **(variables or {}), **ending_variables()}
        with output.open("ab") as file:
            process = self._fork(words, environ, file) or _started(name, words, environ, file)
        self._reaper.watch(process.pid)
        child = Child(name, process, output)
        self._running.append(child)
        if self.stopped_by is not None:  # the signal came before there was this one to get it
            process.send_signal(signal.SIGTERM)
        return child

    def fork_from(self, server: WarmServer | None, report: Callable[[str], None]) -> None:
        """Let a server fork commands from now on, as long as it can."""
        self._server, self._report = server, report
        why = "" if server is None else server.why_not()
        if why:
            self._server = None
            report(f"runs are processes that start cold: {why}")

    def _fork(self, words: Sequence[str], environ: Mapping[str, str], output: IO[bytes]) -> ForkedProcess | None:
        if self._server is None:
            return None
        try:
            return self._server.start(words, environ, output)
        except (OSError, EOFError) as error:
            self._server = None
            self._report(f"runs are processes that start cold from now on: no fork, {error}")
            return None

    def poll(self) -> list[Child]:
        """Those that have ended since the last call."""
        ended = []
        for child in list(self._running):
            child.code = child.process.poll()
            if child.code is not None:
                kill_group(child.process.pid)  # what it started and left behind
                self._reaper.forget(child.process.pid)
                self._running.remove(child)
                ended.append(child)
        return ended

    def pause(self) -> None:
        """Wait until a child has ended or asks something, but not for long."""
        time.sleep(PAUSE)

    def wait(self, child: Child, seconds: float | None = None) -> bool:
        """Wait for the end of one; raises `Stopped` if a signal stops this process meanwhile.

        Args:
            child: The one.
            seconds: After which it is ended; None for as long as it takes.

        Returns:
            Whether it has ended by itself.
        """
        began, by_itself = time.monotonic(), True
        while child.code is None:
            if by_itself and seconds is not None and time.monotonic() - began > seconds:
                by_itself = False
                self.end(child)
            self.refuse_stopped()
            self.poll()
            self.pause()
        return by_itself

    @property
    def stopped_by(self) -> signal.Signals | None:
        """The stop signal that this process got, if it did."""
        return self._signals.received

    def refuse_stopped(self) -> None:
        """After a stop signal: wait until all children have saved, and raise `Stopped`."""
        if self.stopped_by is None:
            return
        self._wait_for_all(_SECONDS_TO_SAVE)
        raise Stopped(f"stopped by {self.stopped_by.name}: start it again to resume it")

    def stop(self) -> None:
        """Let all children save and end."""
        self._forward(signal.SIGTERM)
        self._wait_for_all(_SECONDS_TO_SAVE)

    def end(self, child: Child) -> None:
        """Kill one child and what it started."""
        kill_group(child.process.pid)

    def kill(self) -> None:
        """Kill all children; a signal's handler may call this at any time."""
        for child in list(self._running):
            kill_group(child.process.pid)

    def _forward(self, number: signal.Signals) -> None:
        # SIGTERM for each of them: Ctrl-C is this terminal's, and not theirs.
        for child in list(self._running):
            child.process.send_signal(signal.SIGTERM)

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            self.poll()
            self.pause()


def _started(name: str, words: Sequence[str], environ: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, *interpreter_words(), *words],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"{name} cannot be started: {error.strerror or error}") from None


@contextmanager
def warm_server(
    config: Config, threads: int, output: Path, wanted: bool, report: Callable[[str], None]
) -> Iterator[WarmServer | None]:
    """A server for the runs of a config, which begins to import at once; None where there is none.

    Args:
        threads: Of each rank of a run: some libraries read this when they are imported.
    """
    with ExitStack() as stack:
        server = None
        task = look_at_task(config)
        if wanted and sys.platform != "linux":
            report(f"runs are processes that start cold: a fork is safe on Linux, not on {sys.platform}")
        elif wanted and task is not None:
            server = WarmServer(task.path.resolve(), threads, output)
            stack.callback(server.close)
        yield server
