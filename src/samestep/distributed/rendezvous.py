"""Where the ranks of a run find each other: rank 0 listens, the others join, all introduce themselves.

The port is chosen without a race: rank 0 takes the first of the job's ports that it can bind,
and puts the job's name there; a rank that finds another name, or something that is no store
at all, tries the job's next port.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from samestep.errors import InitError

Report = Callable[[str], None]

_NAME = "samestep/job"
_SECONDS_TO_ANSWER = 5.0
"""How long a listening store gets to answer; anything else that listens never will."""
_SECONDS_TO_AGREE = 2.0
"""How long ranks get to accept a list of all ranks, before rank 0 makes another one."""
_MOST_REFUSALS = 3
"""After that many, a port is not tried again."""
_SECONDS_TO_REPORT = 15.0
"""After that long, a rank reports what it is waiting for, and again after twice as long."""


def serve_store(ports: Sequence[int], name: str, seconds: float) -> Any:
    """Rank 0's part: a store at the first of the ports that is free."""
    taken = ""
    for port in ports:
        try:
            # Its own connection uses loopback, whatever its name resolves to here.
            store = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1",
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=seconds),
            )
        except RuntimeError as error:
            taken = _first_line(error)
            continue
        store.set(_NAME, name)
        return store
    shown = ", ".join(map(str, ports))
    raise InitError(
        f"rank 0 cannot listen at port {shown} of {socket.gethostname()}: {taken}. Something else "
        "uses it, often a run that did not end (`ss -ltnp` shows it): end that, or set another "
        "MASTER_PORT"
    )


def join_store(
    address: str,
    ports: Sequence[int],
    name: str,
    seconds: float,
    report: Report = lambda line: None,
) -> Any:
    """The other ranks' part: the store of the rank 0 that has this job's name."""
    deadline, patience = time.monotonic() + seconds, _Patience(report)
    foreign: dict[int, str] = {}
    refusals: Counter[int] = Counter()
    while True:
        why = ""
        for port in ports:
            if refusals[port] >= _MOST_REFUSALS:
                continue
            why = knock(address, port, min(2.0, seconds))
            if why:
                continue
            store = connect(address, port, min(_SECONDS_TO_ANSWER, seconds))
            if isinstance(store, str):
                foreign[port] = store
                refusals[port] += 1
                continue
            found = _name_at(store)
            if found == name:
                store.set_timeout(timedelta(seconds=seconds))
                return store
            why = f"the store there is of another run ({found})"
        seen = "; ".join([*foreign.values(), *([why] if why else [])])
        where = f"{address}:{'|'.join(map(str, ports))}"
        nowhere = all(refusals[port] >= _MOST_REFUSALS for port in ports)
        if time.monotonic() > deadline or nowhere:
            raise InitError(f"rank 0 does not answer at {where}: {seen}")
        patience.report(f"waiting for rank 0 at {where}: {seen}")
        time.sleep(0.05)


def knock(address: str, port: int, seconds: float) -> str:
    """Why nothing listens there; empty if something does. Torch is loud about a closed port."""
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def connect(address: str, port: int, seconds: float) -> Any:
    """The store that listens there, or a message why there is none.

    On a separate thread: where something else listens, torch waits for its answer forever,
    whatever the timeout.
    """
    outcome: list[Any] = []

    def join() -> None:
        try:
            outcome.append(
                dist.TCPStore(  # type: ignore[attr-defined]
                    address,
                    port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=seconds),
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


def _name_at(store: Any) -> str:
    try:
        store.wait([_NAME], timedelta(seconds=_SECONDS_TO_ANSWER))
        return str(store.get(_NAME).decode())
    except RuntimeError:
        return "without a name"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class _Patience:
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


@dataclass(frozen=True)
class Introduction:
    """What a rank sends to all others before the process group is opened."""

    rank: int
    local_rank: int
    host: str
    cpus: tuple[int, ...]
    """Numbers of the CPUs that it may run on."""
    gpu: str | None
    """What distinguishes its GPU from every other one."""
    address: str | None
    """Its machine's own address towards rank 0."""
    master: tuple[str, ...]
    """What the master's name resolves to on its machine."""


@dataclass(frozen=True)
class Gathering:
    """All ranks of one start, and a name that no other start has."""

    name: str
    ranks: tuple[Introduction, ...]


def introduce(
    store: Any, mine: Introduction, world: int, seconds: float, report: Report = lambda line: None
) -> Gathering:
    """All ranks' introductions, by rank. Rank 0 collects them, and knows who is missing.

    A launcher that restarts ranks may keep its store, with the introductions of the ranks before
    them: so each rank draws a ticket, accepts a list only if its ticket is in it, and rank 0
    makes new lists until all ranks accept the same one.
    """
    ours, ticket = PrefixStore("samestep/introductions", store), uuid.uuid4().hex
    ours.set(str(mine.rank), json.dumps({"ticket": ticket, **asdict(mine)}))
    deadline, patience = time.monotonic() + seconds, _Patience(report)
    while True:
        listed = _make_list(ours, world, deadline, patience) if mine.rank == 0 else _read(ours)
        if listed is not None and ticket in listed["tickets"]:
            name = listed["name"]
            ours.set(f"{name}/{mine.rank}", "")
            if _all_agree(ours, name, mine.rank, world):
                ranks = [
                    Introduction(
                        **{**one, "cpus": tuple(one["cpus"]), "master": tuple(one["master"])}
                    )
                    for one in listed["ranks"]
                ]
                return Gathering(name, tuple(ranks))
        if time.monotonic() > deadline:
            raise InitError(f"not all ranks arrived within {seconds:g} s")
        if mine.rank != 0:
            patience.report(
                "waiting until all ranks have arrived; rank 0 reports which are missing"
            )


def _make_list(store: Any, world: int, deadline: float, patience: _Patience) -> dict[str, Any]:
    """Rank 0's part: wait for all, and publish who is there."""
    _wait_for_all(store, world, deadline, patience)
    ranks = [json.loads(store.get(str(rank))) for rank in range(world)]
    tickets = [one.pop("ticket") for one in ranks]
    listed = {"name": uuid.uuid4().hex, "tickets": tickets, "ranks": ranks}
    store.set("list", json.dumps(listed))
    return listed


def _read(store: Any) -> dict[str, Any] | None:
    try:
        store.wait(["list"], timedelta(seconds=1))
    except RuntimeError:
        return None
    listed: dict[str, Any] = json.loads(store.get("list"))
    return listed


def _all_agree(store: Any, name: str, rank: int, world: int) -> bool:
    """Whether all ranks accept this list; rank 0 notifies the others."""
    if rank == 0:
        names = [f"{name}/{other}" for other in range(world)]
        pause, deadline = 0.002, time.monotonic() + _SECONDS_TO_AGREE
        while not store.check(names):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(0.1, 1.5 * pause)
        store.set(f"{name}/all", "")
        return True
    try:
        store.wait([f"{name}/all"], timedelta(seconds=_SECONDS_TO_AGREE))
    except RuntimeError:
        return False
    return True


def _wait_for_all(store: Any, world: int, deadline: float, patience: _Patience) -> None:
    pause, missing = 0.002, list(range(world))
    while True:
        missing = [rank for rank in missing if not store.check([str(rank)])]
        if not missing:
            return
        shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        if time.monotonic() > deadline:
            raise InitError(f"of {world} ranks, {len(missing)} did not arrive in time: {shown}")
        patience.report(f"waiting for {len(missing)} of {world} ranks: {shown}")
        time.sleep(pause)
        pause = min(0.2, 1.5 * pause)
