"""Opens a process group for a placement: meet, exchange rank facts, agree, open."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from samestep.config import DistributedConfig
from samestep.distributed.hardware import gpu_id
from samestep.distributed.logging import RankLog
from samestep.distributed.placement import Placement
from samestep.distributed.rendezvous import RankInfo, exchange_rank_info
from samestep.distributed.tcp_store import connect, join_store, serve_store
from samestep.environment.fact import Fact
from samestep.environment.hardware import allowed_cpus
from samestep.environment.interfaces import (
    Interface,
    address_towards,
    is_loopback,
    list_interfaces,
    network_id,
    outward,
    own_address,
    rendezvous_address,
    resolve,
)
from samestep.environment.secret import SECRET, signer_of
from samestep.environment.variables import agent_serves_store, export, process_environment
from samestep.errors import InitError, LaunchError

Ranks = Sequence[RankInfo]

_FAST = ("ib", "hsn", "mlx", "efa")


def share_of_cpus(mine: RankInfo, ranks: Ranks) -> int:
    """This rank's CPUs: those it may run on, each shared with the other ranks that may, too.

    A launcher may have bound every rank to its own CPUs, to its socket, or to nothing.
    """
    here = [rank for rank in ranks if rank.host == mine.host]
    share = sum(1.0 / sum(cpu in rank.cpus for rank in here) for cpu in mine.cpus)
    return max(1, int(share + 1e-6))


def ranks_on_one_gpu(ranks: Ranks) -> str:
    """Return which ranks have the same GPU, as text; empty if each has its own."""
    by_gpu: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        if rank.gpu is not None:
            by_gpu.setdefault((rank.host, rank.gpu), []).append(rank.rank)
    return "; ".join(
        f"ranks {', '.join(map(str, shared))} on {host} have one GPU ({gpu})"
        for (host, gpu), shared in by_gpu.items()
        if len(shared) > 1
    )


@dataclass(frozen=True)
class Chosen:
    """A network interface for the ranks, and why it was not left to the backend."""

    variable: str
    value: str
    reason: str


def choose_interface(
    mine: RankInfo, ranks: Ranks, backend: str, interfaces: Sequence[Interface], named_address: str | None
) -> Chosen | None:
    """Return the interface between the machines, where the backend would take another.

    gloo takes the address of the host's own name (`named_address`), which may be loopback or
    of another network; nccl takes the first interface it finds. None: what they take is right.
    Ranks of one machine take loopback, where nobody else can connect to them.
    """
    if all((rank.host, rank.network) == (mine.host, mine.network) for rank in ranks):
        return _loopback(backend, interfaces)
    way = _address_between(mine, ranks, interfaces)
    interface = next((i for i in interfaces if i.address == way), None)
    if way is None or interface is None:
        return None
    if backend == "nccl":
        # Where there is a fast network, nccl finds it better than the route to rank 0 shows.
        fast = any(i.name.startswith(_FAST) for i in interfaces)
        several = len(outward(interfaces)) > 1 and not fast
        reason = f"there are several interfaces, and {way} leads to the other machines"
        return Chosen("NCCL_SOCKET_IFNAME", f"={interface.name}", reason) if several else None
    if named_address == way:
        return None
    reason = f"the name {mine.host} resolves to {named_address}, not to {way}"
    return Chosen("GLOO_SOCKET_IFNAME", interface.name, reason)


def _loopback(backend: str, interfaces: Sequence[Interface]) -> Chosen | None:
    found = (i for i in interfaces if i.address is not None and is_loopback(i.address))
    interface = next(found, None)
    if interface is None:
        return None
    exactly = "=" if backend == "nccl" else ""
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    return Chosen(variable, exactly + interface.name, "all ranks are on this machine")


def _address_between(mine: RankInfo, ranks: Ranks, interfaces: Sequence[Interface]) -> str | None:
    """This machine's address in the network between the machines."""
    away = [rank for rank in ranks if rank.host != mine.host]
    if not away:
        return None
    if mine.host != ranks[0].host:
        return mine.address
    own = {interface.address for interface in interfaces}
    # Rank 0's machine cannot know by itself how the others reach it.
    return next((address for rank in away for address in rank.master if address in own), None)


_NCCL_SHARES_GPUS = (2, 30)
"""The version of nccl that knows NCCL_MULTI_RANK_GPU_ENABLE."""


@dataclass(frozen=True)
class Joined:
    """An open process group, and what this rank knows since it met the others."""

    threads: Fact[int]
    cores: int
    """CPUs that all ranks of the run compute on."""
    hosts: tuple[str, ...]
    """Host of every rank."""
    name: str
    """Name of this start of the ranks, which no other has."""


def open_process_group(section: DistributedConfig, place: Placement) -> Joined:
    """Open the process group of a placement; `InitError` names who or what was missing."""
    log = RankLog(place.rank.value, place.world.value)
    try:
        _export_network(section, log)
        store = _store(section, place, log)
        mine = _introduction(place)
        signer = signer_of(process_environment(), "introductions")
        gathering = exchange_rank_info(store, mine, place.world.value, section.timeout, log.warn, signer)
        ranks = gathering.ranks
        if place.backend.value == "nccl" and (shared := ranks_on_one_gpu(ranks)):
            _let_share_a_gpu(section, mine, shared)
        _choose_interface(place, mine, ranks, log)
        _open(section, place, PrefixStore(f"samestep/{gathering.name}", store))
    except (RuntimeError, ValueError) as error:
        raise InitError(next(iter(str(error).strip().splitlines()), "")) from error
    finally:
        log.close()
    threads = _threads(place, ranks)
    hosts = tuple(rank.host for rank in ranks)
    cores = sum(one.value for one in threads)
    return Joined(threads[place.rank.value], cores, hosts, gathering.name)


def _let_share_a_gpu(section: DistributedConfig, mine: RankInfo, shared: str) -> None:
    if not section.shares_gpus:
        raise LaunchError(
            f"nccl takes one rank per GPU, but {shared}: start fewer ranks, let the launcher "
            "give each rank its own GPU, or set distributed.backend: gloo"
        )
    if torch.cuda.nccl.version() < _NCCL_SHARES_GPUS:
        # It compares GPUs of one machine only: let each rank be a machine, and send over sockets.
        export({"NCCL_HOSTID": f"{mine.host}-{mine.rank}"})


def _threads(place: Placement, ranks: Sequence[RankInfo]) -> list[Fact[int]]:
    """Return the threads of every rank; those of other machines if their limits are as here."""
    if not place.shares_cpus:
        return [place.threads] * len(ranks)
    found = []
    for rank in ranks:
        share = share_of_cpus(rank, ranks)
        reason = f"its share of the {len(rank.cpus)} CPUs it may run on"
        given = place.cpus_per_rank
        limits = [Fact(share, reason), *([given] if given is not None else [])]
        if place.thread_limit is not None and given is None:
            limits.append(Fact(place.thread_limit, place.threads.reason))
        found.append(min(limits, key=lambda limit: limit.value))
    return found


def _store(section: DistributedConfig, place: Placement, log: RankLog) -> Any:
    rank, seconds, environ = place.rank.value, section.timeout, process_environment()
    master, port = str(place.master_addr.value), place.ports[0]
    here = rendezvous_address(master, place.one_machine)
    if agent_serves_store(environ):
        # Ranks that are restarted must not read what those before them left there.
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"attempt {attempt}", _agents_store(here or master, port, seconds))
    name = f"{place.job or 'by hand'} of {place.world.value} ranks"
    signer = signer_of(environ, "stores")
    if rank != 0:
        return join_store(here or master, place.ports, name, seconds, log.warn, signer)
    if here is None:
        raise InitError(
            f"{master} is no address of this machine, on which rank 0 is to listen: set MASTER_ADDR "
            "or distributed.master_addr to the name or address by which the others reach it"
        )
    if signer is None and not place.one_machine:
        log.main(
            f"The ranks do not authenticate each other: {SECRET} is not set. Whoever reaches "
            f"{here} could take part; see docs/security.md"
        )
    return serve_store(here, place.ports, name, seconds, signer)


def _agents_store(address: str, port: int, seconds: float) -> Any:
    store = connect(address, port, seconds)
    if isinstance(store, str):
        raise InitError(f"the launcher's store at {address}:{port} cannot be joined: {store}")
    store.set_timeout(timedelta(seconds=seconds))
    return store


def _export_network(section: DistributedConfig, log: RankLog) -> None:
    """Set what nccl and gloo read; what a machine's own environment sets takes precedence."""
    environ = process_environment()
    for name, value in section.network.items():
        if environ.get(name, value) != value:
            log.main(f"{name}={environ[name]} was set already, and is not changed to {value}")
    export({name: value for name, value in section.network.items() if name not in environ})


def _introduction(place: Placement) -> RankInfo:
    device, master = torch.device(place.device.value), place.master_addr.value
    return RankInfo(
        rank=place.rank.value,
        local_rank=place.local_rank.value,
        host=socket.gethostname(),
        cpus=allowed_cpus(),
        gpu=gpu_id(device.index or 0) if device.type == "cuda" else None,
        address=None if master is None else address_towards(master),
        master=() if master is None else resolve(master),
        network=network_id(),
    )


def _choose_interface(place: Placement, mine: RankInfo, ranks: Sequence[RankInfo], log: RankLog) -> None:
    environ = process_environment()
    for backend in dict.fromkeys((place.backend.value, "gloo")):  # which serves nccl's ranks, too
        if f"{backend.upper()}_SOCKET_IFNAME" in environ:
            continue  # the user chose
        found = choose_interface(mine, ranks, backend, list_interfaces(), own_address(mine.host))
        if found is not None:
            export({found.variable: found.value})
            if mine.local_rank == 0:
                log.everyone(f"{found.variable}={found.value} on {mine.host}: {found.reason}")


def _open(section: DistributedConfig, place: Placement, store: Any) -> None:
    nccl = place.backend.value == "nccl"
    dist.init_process_group(
        place.backend.value,
        store=store,
        rank=place.rank.value,
        world_size=place.world.value,
        timeout=patience(section) if nccl else timedelta(seconds=section.timeout),
        device_id=torch.device(place.device.value) if nccl else None,
    )


def patience(section: DistributedConfig) -> timedelta:
    """Return how long nccl waits: its watchdog must not end a process before the heartbeat reports who hangs."""
    return timedelta(seconds=section.timeout + 60.0)
