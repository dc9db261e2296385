"""What this machine knows of its own interfaces and addresses."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from samestep.environment.interfaces import (
    Interface,
    is_loopback,
    list_interfaces,
    outward,
    own_address,
)


def entry(address: str, family: socket.AddressFamily = socket.AF_INET) -> SimpleNamespace:
    return SimpleNamespace(family=family, address=address)


def test_each_interface_is_listed_once_with_its_first_ipv4_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = {
        "eth0": [entry("fd00::2", socket.AF_INET6), entry("10.0.0.1"), entry("10.0.0.2")],
        "eth0:1": [entry("10.9.0.1")],  # an alias: a second address, not another interface
        "ib0": [entry("fe80::1%ib0", socket.AF_INET6)],
        "lo": [entry("127.0.0.1")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    kernel = [(1, "lo"), (2, "eth0"), (3, "ib0"), (4, "tun0")]
    monkeypatch.setattr(socket, "if_nameindex", lambda: kernel)
    assert list_interfaces() == (
        Interface("lo", "127.0.0.1"),
        Interface("eth0", "10.0.0.1"),
        Interface("ib0", None),
        Interface("tun0", None),
    )


def test_the_loopback_interface_of_this_machine_is_found() -> None:
    assert "127.0.0.1" in [interface.address for interface in list_interfaces()]


def test_only_interfaces_with_an_address_that_are_not_virtual_lead_outward() -> None:
    eth0 = Interface("eth0", "10.0.0.1")
    others = [
        Interface("lo", "127.0.0.1"),
        Interface("docker0", "172.17.0.1"),
        Interface("ib0", None),
    ]
    assert outward([*others, eth0]) == [eth0]


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.1.1", True), ("::1", True), ("10.0.0.1", False), ("fe80::1%eth0", False)],
)
def test_loopback_addresses_are_recognised(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_only_a_local_address_can_be_bound_to() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("203.0.113.1") is None
