"""Names, addresses and network interfaces, as this machine knows them. No torch here."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

_VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "lxc")
"""Interfaces that lead to no other machine."""


@dataclass(frozen=True)
class Interface:
    """A network interface and its IPv4 address."""

    name: str
    address: str | None


def list_interfaces() -> tuple[Interface, ...]:
    """The interfaces of this machine."""
    names = [name for _, name in socket.if_nameindex()]
    return tuple(Interface(name, _address_of(name)) for name in names)


_SIOCGIFADDR = 0x8915
"""Linux's question for the IPv4 address of an interface."""


def _address_of(interface: str) -> str | None:
    if sys.platform != "linux":
        return None
    question = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, question)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def outward(interfaces: Sequence[Interface]) -> list[Interface]:
    """Those that can lead to another machine."""
    return [i for i in interfaces if i.address and not i.name.startswith(_VIRTUAL)]


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def resolve(name: str, seconds: float = 4.0) -> tuple[str, ...]:
    """The addresses of a host name here; none if it has none, or nobody answers in time.

    On a thread of its own: a name server that does not answer would hold the ranks up until
    their collectives time out.
    """
    found: list[str] = []

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return
        found.extend(str(address[0]) for *_, address in answers)

    asking = threading.Thread(target=ask, name="samestep-resolve", daemon=True)
    asking.start()
    asking.join(seconds)
    return tuple(dict.fromkeys(found))


def own_address(host: str) -> str | None:
    """What gloo binds to: the first address of this host's name that is one of its own."""
    return next((address for address in resolve(host) if _is_here(address)), None)


def _is_here(address: str) -> bool:
    """Whether an address is one of this machine's: only those can be bound to."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def address_towards(host: str) -> str | None:
    """This machine's own address on the way to a host; None if it cannot be told.

    If the host is this machine itself, the address that its name stands for here.
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
