"""What this machine knows of its own interfaces and addresses."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from samestep.environment import interfaces
from samestep.environment.interfaces import (
    Interface,
    address_towards,
    is_loopback,
    list_interfaces,
    outward,
    own_address,
    resolve,
)


def entry(address: str, family: socket.AddressFamily = socket.AF_INET) -> SimpleNamespace:
    return SimpleNamespace(family=family, address=address)


def test_each_interface_is_listed_once_with_its_first_ipv4_address(monkeypatch: pytest.MonkeyPatch) -> None:
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
    others = [Interface("lo", "127.0.0.1"), Interface("docker0", "172.17.0.1"), Interface("ib0", None)]
    assert outward([*others, eth0]) == [eth0]


@pytest.mark.parametrize(
    ("address", "expected"), [("127.0.1.1", True), ("::1", True), ("10.0.0.1", False), ("fe80::1%eth0", False)]
)
def test_loopback_addresses_are_recognised(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_only_a_local_address_can_be_bound_to() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("203.0.113.1") is None


def test_an_address_resolves_to_itself_once() -> None:
    assert resolve("127.0.0.1") == ("127.0.0.1",)


@pytest.mark.parametrize("name", ["", "no such host", "a" * 300])
def test_a_name_that_means_nothing_resolves_to_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(host: str, *options: Any, **more: Any) -> Any:
        if len(host) > 63:
            raise UnicodeError("label too long")
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert resolve(name) == ()


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, threads = threading.Event(), []

    def hang(host: str, *options: Any, **more: Any) -> Any:
        threads.append(threading.current_thread())
        answer.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(interfaces, "_SECONDS_TO_RESOLVE", 0.01)
    assert resolve("slow") == ()
    answer.set()
    for thread in threads:
        thread.join()


def test_the_way_to_this_machine_is_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    for interface in list_interfaces():
        if interface.address is not None:
            assert address_towards(interface.address) == interface.address
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: [(0, 0, 0, "", ("127.0.0.1", 0))] * 2)
    assert address_towards("head") == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: [])
    assert address_towards("nowhere") is None
