"""Ranks find each other, and only each other; and what follows from where the others are."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from samestep.distributed import rendezvous, tcp_store
from samestep.distributed.process_group import Chosen, choose_interface, ranks_on_one_gpu, share_of_cpus
from samestep.distributed.rendezvous import RankInfo, WorldInfo, exchange_rank_info
from samestep.distributed.tcp_store import join_store, listen, serve_store
from samestep.environment.interfaces import Interface
from samestep.environment.secret import Signer, claimed, signed
from samestep.errors import InitError, NotAuthentic
from tests.ranks import free_port


def free_ports(count: int) -> list[int]:
    return [free_port() for _ in range(count)]


@contextmanager
def listening() -> Iterator[int]:
    """Something that is no store: it accepts connections and never answers."""
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        yield server.getsockname()[1]
    for thread in threading.enumerate():  # which torch keeps until the connection breaks
        if thread.name == "samestep-join":
            thread.join(10)


@pytest.mark.requirement("002-X-1", "003-R-4")
def test_rank_0_leaves_a_taken_port_and_the_others_follow() -> None:
    with listening() as taken:
        ports = [taken, *free_ports(1)]
        store = serve_store("127.0.0.1", ports, "job", 5)
        store.set("x", "1")
        assert join_store("127.0.0.1", ports, "job", 5).get("x") == b"1"


def test_without_a_free_port_the_message_names_the_fix() -> None:
    with listening() as taken, pytest.raises(InitError) as caught:
        serve_store("127.0.0.1", [taken], "job", 5)
    assert f"cannot listen at port {taken}" in str(caught.value)
    assert "Address already in use" in str(caught.value)
    assert "set another MASTER_PORT" in str(caught.value)


def test_something_that_is_no_store_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "_SECONDS_TO_ANSWER", 0.3)
    with listening() as taken, pytest.raises(InitError) as caught:
        join_store("127.0.0.1", [taken], "job", 60)
    assert "does not answer as rank 0 would" in str(caught.value)


@pytest.mark.requirement("002-X-2")
def test_a_rank_reports_what_it_waits_for_and_then_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "_SECONDS_TO_REPORT", 0.1)
    [port] = free_ports(1)
    reported: list[str] = []
    with pytest.raises(InitError, match=f"rank 0 does not answer at 127.0.0.1:{port}: .*refused"):
        join_store("127.0.0.1", [port], "job", 0.8, reported.append)
    assert reported
    assert all(line.startswith(f"waiting for rank 0 at 127.0.0.1:{port}") for line in reported)
    assert len(reported) <= 3, "it does not repeat itself all the time"


def rank(number: int, host: str = "a", **facts: object) -> RankInfo:
    known = {"local_rank": 0, "cpus": (0, 1), "gpu": None, "address": None, "master": (), **facts}
    return RankInfo(number, host=host, **known)  # type: ignore[arg-type]


def together(join: Callable[[int], None]) -> None:
    """Call it for ranks 0, 1 and 2, each in a thread."""
    threads = [threading.Thread(target=join, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_all_ranks_learn_of_each_other() -> None:
    ports = free_ports(1)
    stores = [serve_store("127.0.0.1", ports, "job", 5)]
    stores += [join_store("127.0.0.1", ports, "job", 5) for _ in range(2)]
    everyone = [rank(0, master=("10.0.0.1",)), rank(1, "b"), rank(2, "b", gpu="x")]
    gathered: dict[int, WorldInfo] = {}

    def join(number: int) -> None:
        gathered[number] = exchange_rank_info(stores[number], everyone[number], 3, 5)

    together(join)
    assert all(gathering.ranks == tuple(everyone) for gathering in gathered.values())
    assert len({gathering.name for gathering in gathered.values()}) == 1


def wait_for_list(store: Any, host: str, ranks: int) -> None:
    """Wait until rank 0 has published a list in which the first `ranks` are on this host."""
    deadline = time.monotonic() + 30
    while True:
        if store.check(["samestep/ranks/list"]):
            listed = json.loads(claimed(store.get("samestep/ranks/list")))["ranks"]
            if [one["host"] for one in listed[:ranks]] == [host] * ranks:
                return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_restarted_ranks_ignore_the_introductions_of_the_ranks_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun keeps its store when it restarts ranks.

    Here each of the second ones comes only after rank 0 has listed its predecessor in its place.
    """
    monkeypatch.setattr(rendezvous, "_SECONDS_TO_AGREE", 0.5)
    ports = free_ports(1)
    stores = [serve_store("127.0.0.1", ports, "job", 5)]
    stores += [join_store("127.0.0.1", ports, "job", 5) for _ in range(2)]
    names = []
    for attempt in (1, 2, 3):
        everyone = [rank(number, f"attempt {attempt}") for number in range(3)]
        gathered: dict[int, WorldInfo] = {}

        def join(number: int) -> None:
            if attempt > 1 and number:  # noqa: B023
                wait_for_list(stores[number], f"attempt {attempt}", number)  # noqa: B023
            gathered[number] = exchange_rank_info(stores[number], everyone[number], 3, 20)  # noqa: B023

        together(join)
        assert all(gathering.ranks == tuple(everyone) for gathering in gathered.values())
        assert len({gathering.name for gathering in gathered.values()}) == 1
        names.append(gathered[0].name)
    assert len(set(names)) == 3


OURS, THEIRS = Signer("ours" * 8, "x"), Signer("theirs" * 8, "x")


@pytest.mark.parametrize("signer", [THEIRS, None], ids=["another secret", "no secret"])
def test_a_rank_without_the_secret_is_refused_and_named(signer: Signer | None) -> None:
    ports = free_ports(1)
    stores = [serve_store("127.0.0.1", ports, "job", 5, OURS)]
    stores += [join_store("127.0.0.1", ports, "job", 5, signer=OURS) for _ in range(2)]
    forged = {"ticket": "x", "rank": 1, "host": "evil", "address": "10.6.6.6"}
    stores[2].set("samestep/ranks/1", signed(signer, json.dumps(forged).encode()))
    reported: list[str] = []
    gathered: dict[int, WorldInfo] = {}

    def join(number: int) -> None:
        if number:
            while not reported:
                time.sleep(0.01)
        gathered[number] = exchange_rank_info(stores[number], rank(number), 2, 20, reported.append, OURS)

    threads = [threading.Thread(target=join, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.host for one in gathered[0].ranks] == ["a", "a"], "the true one took its place"
    assert len(reported) == 1
    assert reported[0].startswith(
        "refused a process that introduced itself as rank 1, host 'evil', address '10.6.6.6': "
    )


def test_a_refused_rank_that_claims_anything_is_harmless() -> None:
    store = serve_store("127.0.0.1", free_ports(1), "job", 5, OURS)
    store.set("samestep/ranks/1", bytes(32) + b"[" * 100_000)
    reported: list[str] = []
    with pytest.raises(InitError, match="of 2 ranks, 1 did not arrive in time: 1"):
        exchange_rank_info(store, rank(0), 2, 0.5, reported.append, OURS)
    assert len(reported) == 1
    assert "introduced itself as rank 1: a message is not signed" in reported[0]


@pytest.mark.parametrize(("server", "client"), [(OURS, THEIRS), (OURS, None), (None, OURS)])
def test_a_rank_0_with_another_secret_is_not_joined(server: Signer | None, client: Signer | None) -> None:
    ports = free_ports(1)
    store = serve_store("127.0.0.1", ports, "job", 5, server)
    with pytest.raises(NotAuthentic, match="SAMESTEP_SECRET"):
        join_store("127.0.0.1", ports, "job", 5, signer=client)
    del store


@pytest.mark.parametrize(("other", "own"), [(None, None), (THEIRS, OURS)])
def test_the_store_of_another_job_is_passed_by_whatever_its_secret(other: Signer | None, own: Signer | None) -> None:
    ports = free_ports(2)
    stores = [
        serve_store("127.0.0.1", ports[:1], "other job", 5, other),
        serve_store("127.0.0.1", ports, "job", 5, own),
    ]
    for store, value in zip(stores, ("theirs", "mine"), strict=True):
        store.set("x", value)
    assert join_store("127.0.0.1", ports, "job", 5, signer=own).get("x") == b"mine"


def test_rank_0_names_the_ranks_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "_SECONDS_TO_REPORT", 0.1)
    store = serve_store("127.0.0.1", free_ports(1), "job", 5)
    reported: list[str] = []
    with pytest.raises(InitError, match="of 4 ranks, 3 did not arrive in time: 1, 2, 3"):
        exchange_rank_info(store, rank(0), 4, 0.5, reported.append)
    assert "waiting for 3 of 4 ranks: 1, 2, 3" in reported


@pytest.mark.parametrize(
    ("masks", "shares"),
    [
        ([(0, 1, 2, 3)] * 2, [2, 2]),  # bound to nothing: each may use all
        ([(0, 1), (2, 3)], [2, 2]),  # bound to its own CPUs
        ([(0, 1, 2, 3), (0, 1, 2, 3), (4, 5), (6, 7)], [2, 2, 2, 2]),  # two share a socket
        ([(0,), (0,), (0,)], [1, 1, 1]),  # more ranks than CPUs: one thread is the least
        ([(0, 1, 2)] * 3, [1, 1, 1]),
        ([(0, 1, 2, 3), (0, 1)], [3, 1]),
    ],
)
def test_a_ranks_cpus_are_those_it_may_use_shared_with_those_who_may_too(
    masks: list[tuple[int, ...]], shares: list[int]
) -> None:
    ranks = [rank(number, cpus=mask) for number, mask in enumerate(masks)]
    assert [share_of_cpus(one, ranks) for one in ranks] == shares


def test_cpus_of_another_machine_are_not_shared() -> None:
    ranks = [rank(0, "a"), rank(1, "b")]
    assert [share_of_cpus(one, ranks) for one in ranks] == [2, 2]


def test_ranks_that_share_a_gpu_are_named() -> None:
    assert ranks_on_one_gpu([rank(0, gpu="x"), rank(1, gpu="y"), rank(2, "b", gpu="x")]) == ""
    shared = ranks_on_one_gpu([rank(0, gpu="x"), rank(1, gpu="x"), rank(2, gpu=None)])
    assert shared == "ranks 0, 1 on a have one GPU (x)"


LO, ETH0, ETH1 = Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.1"), Interface("eth1", "10.9.0.1")


def test_a_store_listens_at_its_address_only() -> None:
    store = listen("127.0.0.1", 0, 5)
    store.set("x", "1")
    assert tcp_store.probe_port("127.0.0.1", store.port, 2) == ""
    assert tcp_store.probe_port("127.0.0.2", store.port, 2) != ""
    with pytest.raises(OSError, match="assign requested address"):
        listen("192.0.2.1", 0, 5)


GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
AWAY = [rank(0, "b"), rank(1, "a", address="10.9.0.1")]


@pytest.mark.requirement("000-P4-5")
@pytest.mark.parametrize(
    ("mine", "ranks", "backend", "interfaces", "named", "chosen"),
    [
        # gloo's own choice is right; containers of one name do not meet by loopback.
        (0, [rank(0), rank(1, "b", master=("10.0.0.1",), address="10.0.0.2")], "gloo", [LO, ETH0], "10.0.0.1", None),
        (0, [rank(0, network="net:1"), rank(1, network="net:2")], "gloo", [LO, ETH0], "10.0.0.1", None),
        # On one machine nobody else can connect.
        (0, [rank(0), rank(1)], "gloo", [ETH0, LO], "10.0.0.1", Chosen(GLOO, "lo", "all ranks are on this machine")),
        (0, [rank(0), rank(1)], "nccl", [ETH0, LO], "10.0.0.1", Chosen(NCCL, "=lo", "all ranks are on this machine")),
        # A loopback name, of rank 0's machine and of another one.
        (0, [rank(0, master=("127.0.1.1",)), rank(1, "b", master=("10.0.0.1",))], "gloo", [LO, ETH0, ETH1], "127.0.1.1",
         Chosen(GLOO, "eth0", "the name a resolves to 127.0.1.1, not to 10.0.0.1")),
        (1, [rank(0, "b"), rank(1, "a", address="10.0.0.1")], "gloo", [LO, ETH0], None,
         Chosen(GLOO, "eth0", "the name a resolves to None, not to 10.0.0.1")),
        # nccl gets one only where it has a choice.
        (1, AWAY, "nccl", [LO, ETH1], "10.0.0.1", None),
        (1, AWAY, "nccl", [LO, ETH0, ETH1, Interface("ib0", "10.5.0.1")], "10.0.0.1", None),
        (1, AWAY, "nccl", [LO, ETH0, ETH1], "10.0.0.1",
         Chosen(NCCL, "=eth1", "there are several interfaces, and 10.9.0.1 leads to the other machines")),
    ],
)  # fmt: skip
def test_an_interface_is_chosen_where_the_backend_takes_another(
    mine: int,
    ranks: list[RankInfo],
    backend: str,
    interfaces: list[Interface],
    named: str | None,
    chosen: Chosen | None,
) -> None:
    assert choose_interface(ranks[mine], ranks, backend, interfaces, named) == chosen
