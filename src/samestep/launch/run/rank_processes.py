"""The ranks of this machine as processes: started, watched and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from samestep.distributed.health.failure_report import FailureReport
from samestep.environment.interpreter import interpreter_words
from samestep.environment.variables import report_variables
from samestep.errors import LaunchError, RunDirError
from samestep.launch.forkserver.forked import FORKED
from samestep.launch.run.orphans import Reaper
from samestep.launch.run.reaper import kill_group

_LONGEST_READ = 1 << 16
_PAUSE = 0.05
_SECONDS_TO_DIE = 10.0
"""A process that does not end when it is killed waits for a device or a file system."""


class Child(Protocol):
    """A process that this one started, as `subprocess.Popen` shows it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        ...

    def send_signal(self, sig: int) -> None: ...


@dataclass
class RankProcess:
    """One rank, and what is known of its end."""

    rank: int
    process: Child
    reports: list[FailureReport] = field(default_factory=list)
    code: int | None = None
    """Its exit code; None while it runs."""
    ended: float = 0.0
    """When that was noticed."""
    stopped_by_us: bool = False
    """Whether it ran when the launcher began to end all ranks."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def failure(self) -> FailureReport | None:
        """Return what it reported first, unless that is the end of its run."""
        return next((report for report in self.reports if report.kind), None)

    @property
    def has_succeeded(self) -> bool:
        """Return whether its run is over, as it says itself: anything may end a process with code 0."""
        return self.code == 0 and self.failure is None and bool(self.reports)


class RankProcesses:
    """Processes that report how they end by a pipe: that needs no file, which a full disk has not."""

    def __init__(self, folder: Path, reaper: Reaper) -> None:
        self._folder, self._reaper = folder, reaper
        self._pipes: dict[int, int] = {}
        self._unread: dict[int, bytes] = {}
        self.ranks: list[RankProcess] = []

    def start(self, rank: int, argv: Sequence[str], environ: Mapping[str, str], redirected: bool) -> int:
        """Start a rank; returns the number of its process."""
        with ExitStack() as stack:
            output = stack.enter_context(self._output(rank)) if redirected else None
            return self.begin(rank, lambda pipe: _start(argv, {**environ, **report_variables(pipe)}, output, pipe))

    def begin(self, rank: int, start: Callable[[int], Child]) -> int:
        """Start a rank by a function, which gets the pipe that the rank is to report to.

        It must lead a group of processes; returns its number.
        """
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)  # a rank must not wait for a launcher that does not read
        with ExitStack() as stack:
            stack.callback(os.close, writing)
            unread = stack.enter_context(ExitStack())
            unread.callback(os.close, reading)
            process = start(writing)
            unread.pop_all()  # it is read as long as the rank runs
        self._reaper.watch(process.pid)
        self.ranks.append(RankProcess(rank, process))
        self._pipes[process.pid], self._unread[process.pid] = reading, b""
        return process.pid

    def _output(self, rank: int) -> IO[bytes]:
        try:
            return (self._folder / f"rank-{rank}.out").open("ab")
        except OSError as error:
            raise RunDirError(
                f"the output of rank {rank} cannot be written to {self._folder}: "
                f"{error.strerror or error}. Set run_dir to a directory that you can write to"
            ) from None

    @property
    def running(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank.code is None]

    @property
    def failed(self) -> list[RankProcess]:
        """Those that ended, but not because their run was over."""
        return [rank for rank in self.ranks if rank.code is not None and not rank.has_succeeded]

    def poll(self) -> None:
        """Look what the ranks reported, and which have ended."""
        for rank in self.running:
            code = rank.process.poll()
            self._read(rank)  # after that, so that nothing it sent last is missed
            if code is not None:
                rank.code, rank.ended = code, time.time()
                os.close(self._pipes.pop(rank.pid))
                kill_group(rank.pid)  # what it started, such as a loader's worker that is stuck
                self._reaper.forget(rank.pid)

    def _read(self, rank: RankProcess) -> None:
        with suppress(BlockingIOError):
            while data := os.read(self._pipes[rank.pid], _LONGEST_READ):
                self._unread[rank.pid] += data
        *lines, self._unread[rank.pid] = self._unread[rank.pid].split(b"\n")
        rank.reports += map(FailureReport.read, lines)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of all ranks; whether they have ended in time."""
        deadline = time.monotonic() + seconds
        while True:
            self.poll()
            if not self.running or time.monotonic() > deadline:
                return not self.running
            time.sleep(_PAUSE)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank that runs; its own processes get none."""
        for rank in self.running:
            rank.process.send_signal(number)

    def end(self, seconds: float) -> None:
        """End all ranks: they get some time to save, and are then killed."""
        for rank in self.running:
            rank.stopped_by_us = True
        self.signal(signal.SIGTERM)
        if not self.wait(seconds):
            self.kill()
            self.wait(_SECONDS_TO_DIE)

    def kill(self) -> None:
        """Kill all ranks, and what they started; a signal's handler may call this at any time."""
        for rank in self.running:
            rank.stopped_by_us = True
            kill_group(rank.pid)


def _start(argv: Sequence[str], environ: Mapping[str, str], output: IO[bytes] | None, pipe: int) -> Child:
    forked = _fork(argv, environ, output, pipe)
    if forked is not None:
        return forked
    try:
        return subprocess.Popen(
            argv, env=environ, stdout=output, stderr=output, pass_fds=[pipe], start_new_session=True
        )
    except OSError as error:
        raise LaunchError(
            f"{argv[0]} cannot be started: {error.strerror or error}. launch.python names the interpreter of the ranks"
        ) from None


def _fork(argv: Sequence[str], environ: Mapping[str, str], output: IO[bytes] | None, pipe: int) -> Child | None:
    """Return a rank that is forked, where this launcher was; None where it must be started."""
    here = FORKED.get()
    ours = (sys.executable, *interpreter_words())
    if here is None or here.forks is None or tuple(argv[: len(ours)]) != ours:
        return None
    streams = {1: 1, 2: 2} if output is None else dict.fromkeys((1, 2), output.fileno())
    try:
        return here.forks.start(argv[len(ours) :], environ, {0: 0, **streams, pipe: pipe})
    except (OSError, EOFError):
        return None  # the process that forks is gone: ranks can still be started
