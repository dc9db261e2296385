"""Real ranks over gloo for tests: forked from a server that has torch imported already."""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# The first optimizer of a process imports torch._dynamo, which takes longer than our runs.
_PRELOADED = (
    "samestep.train.train_once",
    "tests.distributed.tasks",
    "torch._dynamo",
    "torchmetrics",
    "torch.utils.tensorboard",
)


def preload(*modules: str) -> None:
    """Let the server import further modules, once for all ranks. Call it before the first rank."""
    _CONTEXT.set_forkserver_preload([*_PRELOADED, *modules, "tests.frozen"])


preload()


def run_ranks(target: Callable[..., Any], world: int, *args: Any, seconds: float = 300) -> list[Any]:
    """Call `target(*args)` in `world` processes that are ranks of each other; results by rank."""
    answers = answers_of_ranks(target, world, *args, seconds=seconds)
    failed = [(rank, text) for rank, (ok, text) in enumerate(answers) if not ok]
    if failed:
        raise AssertionError("\n".join(f"rank {rank}:\n{text}" for rank, text in failed))
    return [value for _, value in answers]


def answers_of_ranks(
    target: Callable[..., Any], world: int, *args: Any, seconds: float = 300
) -> list[tuple[bool, Any]]:
    """Like `run_ranks`, for ranks that may fail: by rank, whether it did not and what it said."""
    return RankProcesses(target, world, args, seconds).answers()


class RankProcesses:
    """Processes that are ranks of each other, already started."""

    def __init__(self, target: Callable[..., Any], world: int, args: tuple[Any, ...], seconds: float = 300) -> None:
        self._deadline = time.monotonic() + seconds
        port = free_port()
        self._pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(world):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            place = (rank, world, port)
            process = _CONTEXT.Process(target=_rank, args=(theirs, *place, target, args))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def answers(self) -> list[tuple[bool, Any]]:
        """Wait for all; those that do not answer in time are killed, and print where they were."""
        try:
            return [_answer(pipe, self._deadline) for pipe in self._pipes]
        finally:
            for process, pipe in zip(self.processes, self._pipes, strict=True):
                process.join(60)
                if process.is_alive():
                    os.kill(process.pid, signal.SIGABRT)
                    process.join(10)
                    process.kill()
                    process.join()
                pipe.close()


def _answer(pipe: Connection, deadline: float) -> tuple[bool, Any]:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        return False, "no answer in time"
    try:
        return pipe.recv()
    except EOFError:
        return False, "ended without an answer"


def _rank(pipe: Connection, rank: int, world: int, port: int, target: Callable[..., Any], args: Any) -> None:
    faulthandler.enable()
    if world > 1:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    # Loader workers start as they do in `samestep train`, not from the server.
    multiprocessing.set_start_method("fork", force=True)
    try:
        pipe.send((True, target(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


_PORTS = itertools.count(61 * os.getpid())


def free_port() -> int:
    """Return a port that no other test takes: not one of those that the system gives to whoever asks next."""
    while True:
        port = 20_000 + next(_PORTS) % 12_000
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
