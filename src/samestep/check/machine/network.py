"""Checks of names, addresses, interfaces and the rendezvous port."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from samestep.check.machine.facts import Load, Machine
from samestep.check.machine.findings import Finding, Place, Severity, failure, note, ok, spans, warning
from samestep.environment.interfaces import is_loopback, outward, rendezvous_address, resolve

_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


@dataclass(frozen=True)
class Rendezvous:
    """The place where ranks meet, and whether this rank could use it."""

    address: str
    port: int
    addresses: tuple[str, ...]
    """What the address resolves to on this machine."""
    tried: Literal["bind", "join", "nothing"]
    failure: str = ""

    @property
    def possible(self) -> bool:
        """Return whether opening the process group is worth the wait."""
        return bool(self.addresses) and not self.failure


def try_rendezvous(
    address: str, port: int, rank: int, served: bool, seconds: float, one_machine: bool = False
) -> Rendezvous:
    """Try the port as this rank will use it; `served`: a launcher already listens there.

    Otherwise rank 0 will listen, so that the port must be free there, and the others wait for
    it as they would in a run.
    """
    from samestep.distributed.tcp_store import connect  # imports torch, as ranks do anyway

    found = resolve(address)
    if not found:
        return Rendezvous(address, port, (), "nothing")
    own = rendezvous_address(address, one_machine)
    if rank == 0 and not served:
        return Rendezvous(address, port, found, "bind", _bind(own, port))
    failure = _wait_for(own or address, port, seconds)
    if not failure:
        answer = connect(own or address, port, seconds)
        failure = answer if isinstance(answer, str) else ""
    return Rendezvous(address, port, found, "join", failure)


def _wait_for(address: str, port: int, seconds: float) -> str:
    """Return why nothing listens there, after waiting for it; empty once something does."""
    from samestep.distributed.tcp_store import knock

    deadline = time.monotonic() + seconds
    while (why := knock(address, port, seconds)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return why


def _bind(address: str | None, port: int) -> str:
    if address is None:
        return "it is no address of this machine, on which rank 0 is to listen"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        # As torch does: a port in TIME_WAIT, after a run that ended, is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # Without listen(): a rank that is ahead must find rank 0's store here, not this.
            probe.bind((address, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def check_rendezvous(rendezvous: Rendezvous, load: Load) -> Finding:
    """Return whether this rank can reach the rendezvous."""
    check, where = "master", f"{rendezvous.address}:{rendezvous.port}"
    if not rendezvous.addresses:
        return failure(
            check,
            f"the name {rendezvous.address} cannot be resolved on this machine",
            "this rank does not find rank 0, and all wait until the timeout",
            "set MASTER_ADDR to an address that every machine reaches, or add the name to /etc/hosts",
        )
    # Rank 0's own machine may well call itself 127.0.1.1: its store listens where others come from.
    local = rendezvous.address == "localhost" or rendezvous.addresses == (rendezvous.address,)
    if load.nodes > 1 and all(map(is_loopback, rendezvous.addresses)) and (load.node or local):
        return failure(
            check,
            f"{rendezvous.address} is {rendezvous.addresses[0]} here, in a run on {load.nodes} machines",
            "a loopback address is this machine itself: ranks of other machines never meet rank 0",
            "set MASTER_ADDR to rank 0's address in the network between the machines",
        )
    if rendezvous.failure and rendezvous.tried == "bind":
        return failure(
            check,
            f"port {rendezvous.port} cannot be listened at: {rendezvous.failure}",
            "rank 0 waits for the others there; something else already uses it, often a run that did not end",
            "set MASTER_PORT to another port, or end what `ss -ltnp` shows there",
        )
    if rendezvous.failure:
        return failure(
            check,
            f"{where} cannot be joined: {rendezvous.failure}",
            "rank 0, or its launcher, listens there, and ranks find each other through it",
            "check that rank 0 was started, and its output; otherwise let the firewalls "
            "between the machines pass this port, or set MASTER_ADDR (torchrun: --rdzv-endpoint) "
            "to an address that every machine reaches",
        )
    how = {"bind": ", the port is free", "join": ", answers", "nothing": ""}[rendezvous.tried]
    return ok(check, f"{where}{how}")


def check_network(machine: Machine, load: Load) -> list[Finding]:
    """Return what a rank needs from its own machine's network."""
    return [check_own_name(machine, load), check_interfaces(machine, load)]


def check_own_name(machine: Machine, load: Load) -> Finding:
    """Return whether the address that gloo takes is one that other machines reach."""
    check, address = "host name", machine.own_address
    chosen = machine.variables.get("GLOO_SOCKET_IFNAME")
    outside = address is not None and not is_loopback(address)
    found = f"{machine.host} is {address or 'no address of this machine'}"
    if load.nodes == 1 or outside or chosen:
        return ok(check, found if load.nodes > 1 else f"{found}; all ranks are on one machine")
    severity: Severity = "error" if load.backend == "gloo" else "note"
    likely = next((i.name for i in outward(machine.interfaces)), "the interface")
    return Finding(
        check,
        severity,
        f"{found}, in a run on {load.nodes} machines",
        "gloo listens at the address of the host's own name, and else at loopback: ranks of "
        "other machines cannot connect, and all hang until the timeout",
        f"export GLOO_SOCKET_IFNAME={likely}, or give {machine.host} its address in /etc/hosts",
    )


def check_interfaces(machine: Machine, load: Load) -> Finding:
    """Return whether the interfaces named for gloo and nccl exist, and which one is taken."""
    check = "interfaces"
    there = [interface.name for interface in machine.interfaces]
    outside = outward(machine.interfaces)
    chosen = []
    for backend, variable in _VARIABLES.items():
        named = machine.variables.get(variable)
        if named is None:
            continue
        if not _matches(named, there, exact=backend == "gloo"):
            severity: Severity = "error" if backend == load.backend else "note"
            return Finding(
                check,
                severity,
                f"{variable}={named}, but this machine has {', '.join(there) or 'none'}",
                f"{backend} finds no interface of that name and cannot start",
                f"name one of {', '.join(i.name for i in outside) or 'them'}, or unset it",
            )
        chosen.append(f"{variable}={named}")
    shown = ", ".join(f"{i.name} ({i.address})" for i in outside) or "only loopback"
    if chosen:
        return ok(check, f"{shown}; {', '.join(chosen)}")
    if load.nodes > 1 and len(outside) > 1:
        return note(
            check,
            f"{shown}, and none is chosen",
            "gloo takes the one of the host's name and nccl the first: that need not be the "
            "fast one, nor one that other machines reach",
            f"export {_VARIABLES[load.backend]} on every machine to choose",
        )
    return ok(check, shown)


def _matches(named: str, there: Sequence[str], exact: bool) -> bool:
    """Return whether a variable names an interface: gloo by whole names, nccl also by prefixes.

    nccl's `^eth` leaves interfaces out, and `=eth0` means the whole name.
    """
    if not exact and named.startswith("^"):
        return True
    wanted = [part.strip() for part in named.removeprefix("=").split(",")]
    if exact or named.startswith("="):
        return all(part in there for part in wanted)
    return any(name.startswith(part) for part in wanted for name in there)


def check_names(places: Sequence[Place], resolved: Sequence[Mapping[str, tuple[str, ...]]]) -> list[Finding]:
    """Return whether every name means the same machine to every rank; `resolved` is by rank."""
    found = []
    for name in sorted({name for names in resolved for name in names}):
        # A machine may resolve its own name to anything, often 127.0.1.1.
        others = [
            (place, names.get(name, ())) for place, names in zip(places, resolved, strict=True) if place.host != name
        ]
        known = [set(addresses) for _, addresses in others if addresses]
        common = set.intersection(*known) if known else set()
        without = [place.rank for place, addresses in others if not addresses]
        if known and not common:
            found.append(_different(name, others))
        elif known and without:
            found.append(_unknown(name, without))
    if found:
        return found
    return [ok("names", f"{len({p.host for p in places})} host names mean the same on all ranks")]


def _different(name: str, others: Sequence[tuple[Place, tuple[str, ...]]]) -> Finding:
    by_address: dict[str, list[int]] = {}
    for place, addresses in others:
        by_address.setdefault(" and ".join(addresses) or "unknown", []).append(place.rank)
    meanings = "; ".join(f"{key} to ranks {spans(ranks)}" for key, ranks in by_address.items())
    return warning(
        "names",
        f"{name} is {meanings}",
        "ranks that take a name for different machines do not meet, or by different networks",
        "make /etc/hosts or the name server agree on every machine",
    )


def _unknown(name: str, ranks: Sequence[int]) -> Finding:
    return note(
        "names",
        f"{name} cannot be resolved by ranks {spans(ranks)}",
        "samestep needs only the master's name, but other tools may need all of them",
        "add it to /etc/hosts or the name server there",
    )
