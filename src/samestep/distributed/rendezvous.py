"""All ranks introduce themselves before the process group is opened; rank 0 knows who is missing."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from samestep.distributed.tcp_store import Patience
from samestep.environment.secret import SECRET, Signer, claimed, message_of, signed
from samestep.errors import InitError, NotAuthentic

Report = Callable[[str], None]

_LIST = "list"
_SECONDS_TO_AGREE = 2.0
"""How long ranks get to accept a list of all ranks, before rank 0 makes another one."""
_LONGEST_CLAIM = 4096
"""Bytes that are read of what somebody without the secret sent."""


@dataclass(frozen=True)
class RankInfo:
    """The message of a rank to all others before the process group is opened."""

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
    network: str = ""
    """What distinguishes its machine's network from every other one's, loopback included."""


@dataclass(frozen=True)
class WorldInfo:
    """All ranks of one start, and a name that no other start has."""

    name: str
    ranks: tuple[RankInfo, ...]


def exchange_rank_info(
    store: Any,
    mine: RankInfo,
    world: int,
    seconds: float,
    report: Report = lambda line: None,
    signer: Signer | None = None,
    what: str = "rank",
) -> WorldInfo:
    """Return all ranks' introductions, by rank. Rank 0 collects them, and knows who is missing.

    A launcher that restarts ranks may keep its store, with the introductions of the ranks before
    them: so each rank draws a ticket, accepts a list only if its ticket is in it, and rank 0
    makes new lists until all ranks accept the same one.

    Args:
        signer: Signs what is sent; a rank whose introduction it did not sign is refused.
        what: What a rank is in messages, if it is none.
    """
    ours = _Documents(PrefixStore(f"samestep/{what}s", store), signer, report, what)
    ticket = uuid.uuid4().hex
    deadline, patience = time.monotonic() + seconds, Patience(report)
    while True:
        # Each time: somebody else may have written to the store meanwhile.
        ours.set(str(mine.rank), {"ticket": ticket, **asdict(mine)})
        if mine.rank == 0:
            listed: dict[str, Any] | None = _make_list(ours, world, deadline, patience)
        else:
            listed = ours.wait(_LIST)
        if listed is not None and ticket in listed["tickets"]:
            name = listed["name"]
            ours.store.set(f"{name}/{mine.rank}", "")
            if _all_agree(ours.store, name, mine.rank, world):
                return WorldInfo(name, tuple(map(_introduction, listed["ranks"])))
        if time.monotonic() > deadline:
            raise InitError(f"not all {what}s arrived within {seconds:g} s")
        if mine.rank != 0:
            patience.report(f"waiting until all {what}s have arrived; {what} 0 reports which are missing")


def _introduction(one: dict[str, Any]) -> RankInfo:
    return RankInfo(**{**one, "cpus": tuple(one["cpus"]), "master": tuple(one["master"])})


class _Documents:
    """Signed documents in a store; one of somebody without the secret counts as missing."""

    def __init__(self, store: Any, signer: Signer | None, report: Report, what: str) -> None:
        self.store, self.what = store, what
        self._signer, self._report = signer, report
        self._refused: set[bytes] = set()

    def set(self, key: str, document: dict[str, Any]) -> None:
        self.store.set(key, signed(self._signer, json.dumps(document).encode()))

    def get(self, key: str) -> dict[str, Any] | None:
        """Return a document, or None if it is missing."""
        if not self.store.check([key]):
            return None
        received = self.store.get(key)
        try:
            document: dict[str, Any] = json.loads(message_of(self._signer, received))
        except NotAuthentic as error:
            if self._signer is None:
                raise  # all others have a secret, which this rank does not know
            self._refuse(key, received, error)
            return None
        return document

    def wait(self, key: str) -> dict[str, Any] | None:
        """Return a document, or None if it does not come within a second."""
        try:
            self.store.wait([key], timedelta(seconds=1))
        except RuntimeError:
            return None
        found = self.get(key)
        if found is None:
            time.sleep(0.1)  # it was refused, and may be replaced
        return found

    def _refuse(self, key: str, received: bytes, error: NotAuthentic) -> None:
        if received not in self._refused:
            self._refused.add(received)
            whose = f"{self.what} {0 if key == _LIST else key}"
            self._report(
                f"refused a process that introduced itself as {whose}{_sender(received)}: {error}. "
                f"If it is one of yours, set the same {SECRET} for all of them"
            )


def _sender(received: bytes) -> str:
    """Return who sent a document, by its own account; it may claim anything."""
    try:
        document = json.loads(claimed(received)[:_LONGEST_CLAIM])
        found = {name: str(document[name])[:64] for name in ("host", "address") if document[name]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return "".join(f", {name} {value!r}" for name, value in found.items())


def _make_list(ours: _Documents, world: int, deadline: float, patience: Patience) -> dict[str, Any]:
    """Rank 0's part: wait for all, and publish who is there."""
    ranks = _wait_for_all(ours, world, deadline, patience)
    tickets = [one.pop("ticket") for one in ranks]
    listed = {"name": uuid.uuid4().hex, "tickets": tickets, "ranks": ranks}
    ours.set(_LIST, listed)
    return listed


def _all_agree(store: Any, name: str, rank: int, world: int) -> bool:
    """Return whether all ranks accept this list; rank 0 notifies the others."""
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


def _wait_for_all(ours: _Documents, world: int, deadline: float, patience: Patience) -> list[dict[str, Any]]:
    pause: float = 0.002
    found: dict[int, dict[str, Any] | None] = dict.fromkeys(range(world))
    while True:
        found = {rank: one or ours.get(str(rank)) for rank, one in found.items()}
        missing = [rank for rank, one in found.items() if one is None]
        if not missing:
            return [one for one in found.values() if one is not None]
        shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        if time.monotonic() > deadline:
            late = f"{len(missing)} did not arrive in time: {shown}"
            raise InitError(f"of {world} {ours.what}s, {late}")
        patience.report(f"waiting for {len(missing)} of {world} {ours.what}s: {shown}")
        time.sleep(pause)
        pause = min(0.2, 1.5 * pause)
