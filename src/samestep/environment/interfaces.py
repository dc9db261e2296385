"""Host names, addresses and network interfaces as seen from this machine. Imports no torch."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
_ANYWHERE = "192.0.2.1"
"""An address that is nobody's: the route to it is the one to other networks."""
_VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "lxc")
"""Prefixes of interfaces that reach no other machine."""


@dataclass(frozen=True)
class Interface:
    """A network interface and its IPv4 address, None if it has none."""

    name: str
    address: str | None


def list_interfaces() -> tuple[Interface, ...]:
    """Return the network interfaces of this machine, in the kernel's order, each with its first address.

    Their names come from the kernel's own list: psutil also lists aliases such as `eth0:1`, which
    are a second address of an interface and not another interface.
    """
    import psutil

    first_address: dict[str, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET:
                first_address.setdefault(name, entry.address)
    names = [name for _, name in socket.if_nameindex()]
    return tuple(Interface(name, first_address.get(name)) for name in names)


def outward(interfaces: Sequence[Interface]) -> list[Interface]:
    """Return the interfaces that can reach another machine."""
    return [i for i in interfaces if i.address and not i.name.startswith(_VIRTUAL)]


def is_loopback(address: str) -> bool:
    """Return whether an IPv4 or IPv6 address (a zone such as `%eth0` may follow) is a loopback address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


_SECONDS_TO_RESOLVE = 4.0


def resolve(name: str) -> tuple[str, ...]:
    """Return the addresses that a host name resolves to on this machine.

    The lookup runs in its own thread: an unresponsive name server would otherwise block the ranks
    until their collectives time out.

    Args:
        name: a host name or an address.

    Returns:
        The addresses in the resolver's order; empty if there are none or the lookup timed out.
    """
    found: list[str] = []

    def look_up() -> None:
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return
        found.extend(str(address[0]) for *_, address in answers)

    lookup = threading.Thread(target=look_up, name="samestep-resolve", daemon=True)
    lookup.start()
    lookup.join(_SECONDS_TO_RESOLVE)
    return tuple(dict.fromkeys(found))


def own_address(host: str) -> str | None:
    """Return the address gloo binds to: the first one of `host` (this machine's name) that is local."""
    return next((address for address in resolve(host) if _is_local(address)), None)


def _is_local(address: str) -> bool:
    """Return whether an address belongs to this machine: only those can be bound to."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def address_towards(host: str) -> str | None:
    """This machine's source address on the route to a host; None if there is no route.

    If the host is this machine itself, the address that its name resolves to.
    """
    for address in resolve(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # which sends nothing
            try:
                probe.connect((address, 9))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def network_id() -> str:
    """Return what two processes share that reach each other by loopback: not two containers, for example."""
    kernel, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    try:
        return f"{kernel.read_text().strip()} {namespace.readlink()}"
    except OSError:
        return ""  # not Linux: the host's name alone distinguishes machines


def rendezvous_address(name: str, one_machine: bool = False) -> str | None:
    """Return where a process of this machine listens that others know by `name`, and nowhere else.

    The processes of this machine join it there, too. None: `name` is another machine.

    Args:
        name: A host name or address of the machine where all meet.
        one_machine: Whether all of them are on this machine.
    """
    if one_machine:
        return LOOPBACK
    own = [address for address in resolve(name) if _is_local(address)]
    outside = [address for address in own if not is_loopback(address)]
    if outside or not own:
        return next(iter(outside), None)
    if name == "localhost" or name in own:
        return own[0]
    # Debian gives a machine's own name a loopback address, by which nobody else can know it.
    towards = address_towards(_ANYWHERE)
    others = [interface.address for interface in outward(list_interfaces())]
    return next((address for address in (towards, *others) if address), own[0])
