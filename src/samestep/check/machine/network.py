"""Checks of addresses and network interfaces."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.check.machine.facts import Load, Machine
from samestep.check.machine.findings import Finding, Severity, failure, note, ok
from samestep.environment.interfaces import is_loopback, outward, resolve

_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


def check_master(address: str, load: Load) -> list[Finding]:
    """Return what is wrong with the address where ranks were to meet, and did not."""
    check, found = "master", resolve(address)
    if not found:
        return [
            failure(
                check,
                f"the name {address} cannot be resolved on this machine",
                "this rank does not find rank 0, and all wait until the timeout",
                "set MASTER_ADDR to an address that every machine reaches, or add the name to /etc/hosts",
            )
        ]
    # Rank 0's own machine may well call itself 127.0.1.1: its store listens where others come from.
    local = address == "localhost" or found == (address,)
    if load.nodes > 1 and all(map(is_loopback, found)) and (load.node or local):
        return [
            failure(
                check,
                f"{address} is {found[0]} here, in a run on {load.nodes} machines",
                "a loopback address is this machine itself: ranks of other machines never meet rank 0",
                "set MASTER_ADDR to rank 0's address in the network between the machines",
            )
        ]
    return []


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
            severity: Severity = "error" if backend == load.backend and load.world > 1 else "note"
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
    if exact:
        return all(part in there for part in wanted)
    if named.startswith("="):
        return any(part in there for part in wanted)
    return any(name.startswith(part) for part in wanted for name in there)
