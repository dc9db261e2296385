"""TCP stores: one process serves it at one address, the others join.

The port is chosen without a race: rank 0 takes the first of the job's ports that it can bind,
and puts the job's name there; a rank that finds another name, or something that is no store
at all, tries the job's next port.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from samestep.environment.secret import Signer, claimed, message_of, signed
from samestep.errors import InitError, NotAuthentic

Report = Callable[[str], None]

_NAME = "samestep/job"
_SECONDS_TO_ANSWER = 5.0
"""How long a listening store gets to answer; anything else that listens never will."""
_BACKLOG = 1024
"""Ranks that may connect at once."""
_MOST_REFUSALS = 3
"""After that many, a port is not tried again."""
_SECONDS_TO_REPORT = 15.0
"""After that long, a rank reports what it is waiting for, and again after twice as long."""


def serve_store(address: str, ports: Sequence[int], name: str, seconds: float, signer: Signer | None = None) -> Any:
    """Rank 0's part: a store at the first of the ports that is free, at this address only."""
    taken = ""
    for port in ports:
        try:
            store = listen(address, port, seconds)
        except OSError as error:
            taken = error.strerror or str(error)
            continue
        store.set(_NAME, signed(signer, name.encode()))
        return store
    shown = ", ".join(map(str, ports))
    raise InitError(
        f"rank 0 cannot listen at port {shown} of {address} on {socket.gethostname()}: {taken}. "
        "Something else uses it, often a run that did not end (`ss -ltnp` shows it): end that, or "
        "set another MASTER_PORT"
    )


def listen(address: str, port: int, seconds: float) -> Any:
    """Serve a store at one address; torch alone would listen at every address of the machine.

    Raises:
        OSError: The port is taken, or the address is not of this machine.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        # As torch does: a port in TIME_WAIT, after a run that ended, is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
            master_listen_fd=listener.fileno(),
        )
        listener.detach()  # which is the store's now
    return store


def join_store(
    address: str,
    ports: Sequence[int],
    name: str,
    seconds: float,
    report: Report = lambda line: None,
    signer: Signer | None = None,
) -> Any:
    """Return the other ranks' part: the store of the rank 0 that has this job's name.

    Raises:
        InitError: There is none.
        NotAuthentic: It is served by somebody who does not have this launch's secret.
    """
    deadline, patience = time.monotonic() + seconds, Patience(report)
    foreign: dict[int, str] = {}
    refusals: Counter[int] = Counter()
    while True:
        why = ""
        for port in ports:
            if refusals[port] >= _MOST_REFUSALS:
                continue
            why = probe_port(address, port, min(2.0, seconds))
            if why:
                continue
            store = connect(address, port, min(_SECONDS_TO_ANSWER, seconds))
            if isinstance(store, str):
                foreign[port] = store
                refusals[port] += 1
                continue
            why = _is_another(store, name, signer)
            if not why:
                store.set_timeout(timedelta(seconds=seconds))
                return store
        seen = "; ".join([*foreign.values(), *([why] if why else [])])
        where = f"{address}:{'|'.join(map(str, ports))}"
        nowhere = all(refusals[port] >= _MOST_REFUSALS for port in ports)
        if time.monotonic() > deadline or nowhere:
            raise InitError(f"rank 0 does not answer at {where}: {seen}")
        patience.report(f"waiting for rank 0 at {where}: {seen}")
        time.sleep(0.05)


def probe_port(address: str, port: int, seconds: float) -> str:
    """Return why nothing listens there; empty if something does. Torch is loud about a closed port."""
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def connect(address: str, port: int, seconds: float) -> Any:
    """Return the store that listens there, or a message why there is none.

    On a separate thread: where something else listens, torch waits for its answer forever,
    whatever the timeout.
    """
    outcome: list[Any] = []

    def join() -> None:
        try:
            outcome.append(
                dist.TCPStore(  # type: ignore[attr-defined]
                    address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds)
                )
            )
        except (RuntimeError, ValueError) as error:
            outcome.append(_first_line(error))

    joining = threading.Thread(target=join, name="samestep-join", daemon=True)
    joining.start()
    joining.join(seconds + 2.0)
    if not outcome:
        return f"something listens at {address}:{port}, but it does not answer as rank 0 would"
    return outcome[0]


def _is_another(store: Any, name: str, signer: Signer | None) -> str:
    """Return why this store is not of the job with that name; empty if it is."""
    try:
        store.wait([_NAME], timedelta(seconds=_SECONDS_TO_ANSWER))
        received = store.get(_NAME)
    except RuntimeError:
        return "the store there is of another run (without a name)"
    try:
        found = message_of(signer, received).decode(errors="replace")
    except NotAuthentic:
        found = claimed(received).decode(errors="replace")
        if found == name:  # no other job has that name by accident
            raise
    return "" if found == name else f"the store there is of another run ({found})"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class Patience:
    """Reports what is waited for, but seldom."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._pause = _SECONDS_TO_REPORT
        self._next = time.monotonic() + self._pause

    def report(self, message: str) -> None:
        if time.monotonic() > self._next:
            self._report(message)
            self._pause *= 2
            self._next = time.monotonic() + self._pause
