"""The rendezvous of a launch's agents, and the store that their ranks use.

On one machine at a loopback address. Over several machines at the one address by which the
others reach it, and only with the launch's secret: torch's elastic rendezvous unpickles the
state that it finds in the store.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from inspect import signature
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
)

from samestep.distributed.rendezvous import RankInfo, exchange_rank_info
from samestep.distributed.tcp_store import join_store, serve_store
from samestep.environment.interfaces import LOOPBACK, address_towards, rendezvous_address
from samestep.environment.secret import Signer
from samestep.errors import InitError, LaunchError, NotAuthentic

Report = Callable[[str], None]

_SECONDS_TO_READ = 60.0
"""How long an elastic store gets to answer, as in torch."""
_KEEP_ALIVE = {"keep_alive_interval": 2, "keep_alive_max_attempt": 8}
"""A node that is gone is left out after 16 s; less, and clocks that are some seconds apart would
make a node seem dead, since torch compares their times. Older versions of torch lack them."""


class StaticRendezvous(RendezvousHandler):
    """Machines that are numbered, or one alone; the first one's agent serves the store of all.

    Args:
        port: There; 0 for any, if there are no others.
    """

    def __init__(
        self,
        address: str,
        port: int,
        node: int,
        nodes: int,
        name: str,
        seconds: float,
        signer: Signer | None,
        report: Report,
    ) -> None:
        self._address, self._port = address, port
        self._node, self._nodes, self._name = node, nodes, name
        self._seconds, self._signer, self._report = seconds, signer, report
        self._store: Any = None

    @classmethod
    def of_one_machine(cls, name: str, seconds: float) -> StaticRendezvous:
        return cls(LOOPBACK, 0, 0, 1, name, seconds, None, lambda line: None)

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._meet()
        store = PrefixStore(self._name, self._store)
        where = RendezvousStoreInfo(self._address, self._port)
        return RendezvousInfo(store, self._node, self._nodes, where)

    def _meet(self) -> None:
        own = rendezvous_address(self._address)
        if self._node == 0:
            if own is None:
                raise LaunchError(
                    f"{self._address} is no address of this machine, which is number 0 and listens "
                    "there: give the name or address by which the others reach it"
                )
            self._address = own
            self._store = serve_store(own, [self._port], self._name, self._seconds, self._signer)
            self._port = self._store.port
        else:
            self._address = own or self._address  # several agents may share a machine
            self._store = join_store(self._address, [self._port], self._name, self._seconds, self._report, self._signer)
        if self._nodes > 1:
            towards, host = address_towards(self._address), socket.gethostname()
            mine = RankInfo(self._node, 0, host, (), None, towards, ())
            exchange_rank_info(self._store, mine, self._nodes, self._seconds, self._report, self._signer, "machine")

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass  # nobody joins later

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._name

    def shutdown(self) -> bool:
        return True


def elastic_rendezvous(host: str, port: int, fewest: int, most: int, name: str, signer: Signer) -> RendezvousHandler:
    """Machines that come and go, which meet again each time."""
    own = rendezvous_address(host)
    store = _elastic_store(own, host, port, name, signer)
    make: Callable[..., RendezvousHandler] = DynamicRendezvousHandler.from_backend
    return make(
        name,
        store,
        SignedState(C10dRendezvousBackend(store, name), signer),
        fewest,
        most,
        own or address_towards(host),
        RendezvousTimeout(last_call=timedelta(seconds=5)),
        **{key: value for key, value in _KEEP_ALIVE.items() if key in signature(make).parameters},
    )


def _elastic_store(own: str | None, host: str, port: int, name: str, signer: Signer) -> Any:
    """Served by the first agent on the machine where all meet; the others check that it has the secret."""
    if own is not None:
        try:
            return serve_store(own, [port], name, _SECONDS_TO_READ, signer)
        except InitError:
            host = own  # another agent of this machine serves it, or somebody else
    try:
        return join_store(host, [port], name, _SECONDS_TO_READ, signer=signer)
    except NotAuthentic:
        raise LaunchError(
            f"the store at {host}:{port} is served by somebody without this launch's secret: another user's "
            "program, or a launch with another SAMESTEP_SECRET. End it, or meet at another port"
        ) from None


class SignedState(RendezvousBackend):
    """A rendezvous state that only those with the secret can have written: it is unpickled."""

    def __init__(self, backend: RendezvousBackend, signer: Signer) -> None:
        self._backend, self._signer = backend, signer

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._backend.get_state()
        return None if found is None else (self._verified(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        found = self._backend.set_state(self._signer.sign(state), token)
        return None if found is None else (self._verified(found[0]), *found[1:])

    def _verified(self, state: bytes) -> bytes:
        try:
            return self._signer.verified(state)
        except NotAuthentic as error:
            # As torch's own error for a state that cannot be used, which its threads handle.
            raise RendezvousStateError(f"somebody without this launch's secret wrote to the store: {error}") from error
