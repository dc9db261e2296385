"""Ranks for a function of a notebook: forked, since what a cell defines cannot be imported."""

from __future__ import annotations

import codecs
import io
import multiprocessing
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.context import ForkProcess
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch

from samestep.distributed.health.failure_report import report_end, report_failure
from samestep.distributed.objects import packed, unpacked
from samestep.distributed.signals import end_with_parent
from samestep.distributed.tcp_store import listen
from samestep.environment.interfaces import LOOPBACK
from samestep.environment.launch import detect_launch
from samestep.environment.secret import SECRET, Signer, new_secret
from samestep.environment.variables import (
    export,
    launch_variables,
    launcher_process,
    process_environment,
    report_variables,
    thread_variables,
)
from samestep.errors import LaunchError
from samestep.launch.run.exit_report import exit_report
from samestep.launch.run.orphans import Reaper
from samestep.launch.run.rank_processes import RankProcesses

_FORK = multiprocessing.get_context("fork") if sys.platform != "win32" else None
_SECONDS_TO_MEET = 600.0
_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_FOLLOW = 10.0
"""How long the other ranks get to notice by themselves that one has failed, and to report it."""
_SECONDS_TO_END = 30.0
"""How long they get after that: a checkpoint may be half written."""
_LONGEST_READ = 1 << 16


def notebook_launcher(function: Callable[..., Any], nproc: int, *args: Any) -> Any:
    """Call a function on several ranks of this machine, from a notebook.

    The ranks are forked from this process and so know everything that the notebook has defined. They
    find the variables that `samestep.start` and `torch.distributed` read, and compute with one thread
    each. Rank 0's output is shown; nothing listens beyond this machine's own address.

    Args:
        function: What each rank calls; it must be the first to use CUDA.
        nproc: The number of ranks; on GPUs, one for each.
        *args: The function's arguments.

    Returns:
        What the function returned on rank 0; it is pickled, and tensors should be on the CPU.

    Raises:
        LaunchError: CUDA was used in this process before, so that no rank could use it; or this
            process is a rank itself.
        RankFailed: A rank failed, and all were ended; the message has its traceback.

    Example:
        def train(epochs):
            with samestep.start(global_batch=64, epochs=epochs) as run:
                ...
        samestep.notebook_launcher(train, 2, 3)
    """
    folder = Path(mkdtemp(prefix="samestep-notebook-"))
    value = call_on_forks(function, nproc, args, _print, folder)
    rmtree(folder)  # kept where a rank has failed, since its output is there
    return value


def call_on_forks(
    function: Callable[..., Any], nproc: int, args: tuple[Any, ...], show: Callable[[str], None], folder: Path
) -> Any:
    """Call a function on several ranks, as `notebook_launcher` does."""
    _check(function, nproc)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        reaper = Reaper(_SECONDS_TO_END)
        stack.callback(reaper.close)
        ranks = _ForkedRanks(function, args, nproc, folder, reaper, show)
        stack.callback(ranks.close)
        ranks.run()
        return ranks.result()


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _check(function: Callable[..., Any], nproc: int) -> None:
    if not callable(function):
        raise LaunchError(
            f"notebook_launcher got {function!r}, which cannot be called: give the function first, "
            "then the number of ranks and the function's arguments"
        )
    if not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1:
        raise LaunchError(f"nproc is {nproc!r}: give the number of ranks, at least 1")
    launch = detect_launch(process_environment())
    if launch.external:
        raise LaunchError(
            f"this process is rank {launch.rank} of {launch.launcher} already: call the function "
            "itself, or start this program without a launcher"
        )
    if torch.cuda.is_initialized() or _cannot_use_cuda_in_a_fork():
        raise LaunchError(
            "this process has used CUDA already, and processes that are forked from it cannot: restart "
            "the notebook's kernel, and run notebook_launcher before any cell that moves something to "
            "a GPU or asks torch.cuda about one. Models and tensors on GPUs are made in the function"
        )


def _cannot_use_cuda_in_a_fork() -> bool:
    """Return whether a query of torch.cuda has spoiled forks, which only a fork can tell."""
    assert _FORK is not None, "there is no fork on this platform"
    probe = _FORK.Process(target=_exit_as_spoiled)
    probe.start()
    probe.join()
    return probe.exitcode == 1


def _exit_as_spoiled() -> None:
    os._exit(torch.cuda._is_in_bad_fork())


class _ForkedRanks:
    """The ranks of one call, from their start to their end."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        nproc: int,
        folder: Path,
        reaper: Reaper,
        show: Callable[[str], None],
    ) -> None:
        self._function, self._args, self._nproc, self._folder = function, args, nproc, folder
        self._shows = show
        # Served here, at one address: rank 0 of a function that knows only torch would listen at all.
        self._store = listen(LOOPBACK, 0, _SECONDS_TO_MEET)
        self._secret, self._name = new_secret(), uuid.uuid4().hex
        self._processes = RankProcesses(folder, reaper)
        self._shown, self._output = os.pipe()
        os.set_blocking(self._shown, False)
        # No rank talks to the store before all are forked: its thread here could hold a lock, which stays held in a fork.
        self._gate, self._opens_gate = os.pipe()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def run(self) -> None:
        """Start the ranks and wait; raises what the first failing one reported."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else each rank would write again what is still to be written
        try:
            for rank in range(self._nproc):
                self._processes.begin(rank, lambda pipe, rank=rank: self._fork(rank, pipe))  # type: ignore[misc]
            if not self._processes.failed:
                os.write(self._opens_gate, b"." * self._nproc)
            while self._processes.running and not self._processes.failed:
                self._look()
            deadline = time.monotonic() + _SECONDS_TO_FOLLOW
            while self._processes.running and time.monotonic() < deadline:
                self._look()
        finally:  # also where the cell is interrupted
            self._processes.end(_SECONDS_TO_END)
            self._show()
        if self._processes.failed:
            raise exit_report(self._processes.ranks, self._folder, keeps_logs=False).error from None

    def result(self) -> Any:
        return unpacked(self._result.read_bytes(), self._signer)

    def close(self) -> None:
        for number in (self._shown, self._output, self._gate, self._opens_gate):
            os.close(number)

    @property
    def _result(self) -> Path:
        return self._folder / "result"

    @property
    def _signer(self) -> Signer:
        return Signer(self._secret, "results")

    def _fork(self, rank: int, pipe: int) -> _Forked:
        assert _FORK is not None
        variables = {**self._variables(rank), **report_variables(pipe)}
        process = _FORK.Process(target=self._in_rank, args=(rank, variables))
        process.start()
        return _Forked(process)

    def _variables(self, rank: int) -> dict[str, str]:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        network = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback)
        return {
            **{name: value for name, value in network.items() if name not in process_environment()},
            **launch_variables(self._name),
            # Threads that were started before a fork are gone in it: a second one may wait for them.
            **thread_variables(1),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._nproc),
            "LOCAL_WORLD_SIZE": str(self._nproc),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            SECRET: self._secret,
        }

    def _in_rank(self, rank: int, variables: dict[str, str]) -> None:
        """The life of a rank; a traceback goes to the notebook by its report."""
        try:
            _forget_signals()
            os.setsid()
            os.close(self._opens_gate)
            export(variables)
            self._redirect(rank)
            end_with_parent(signal.SIGTERM, launcher_process(process_environment()))
            torch.set_num_threads(1)
            if not os.read(self._gate, 1):
                os._exit(1)  # the notebook is gone
            os.close(self._gate)
            value = self._function(*self._args)
            if rank == 0:
                self._result.write_bytes(packed(value, self._signer))
        except BaseException as error:
            report_failure(error)
            _flush()
            os._exit(1)
        report_end()
        _flush()

    def _redirect(self, rank: int) -> None:
        """Rank 0's output goes to the notebook, which may show it in its own way; others' to files."""
        if rank == 0:
            number = self._output
        else:
            path = self._folder / f"rank-{rank}.out"
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(number, 1)
        os.dup2(number, 2)
        # A notebook's own streams belong to threads that are not in this process.
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(
                io.FileIO(stream, "w", closefd=False), encoding="utf-8", errors="backslashreplace", write_through=True
            )
            for stream in (1, 2)
        )
        sys.stdin = io.StringIO()

    def _look(self) -> None:
        self._processes.wait(_SECONDS_BETWEEN_LOOKS)
        self._show()

    def _show(self) -> None:
        """Pass on what rank 0 has written."""
        text = ""
        with suppress(BlockingIOError):
            while data := os.read(self._shown, _LONGEST_READ):
                text += self._decoder.decode(data)
        self._shows(text)


class _Forked:
    """A fork, as `subprocess.Popen` would show it."""

    def __init__(self, process: ForkProcess) -> None:
        self._process = process
        assert process.pid is not None, "it was started"
        self.pid: int = process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def _forget_signals() -> None:
    """Restore default handlers: what a notebook does on a signal is not for its ranks."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
