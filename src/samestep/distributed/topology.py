"""Derives a rank's share of CPUs, GPUs and the network from where the others run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.distributed.rendezvous import RankInfo
from samestep.environment.interfaces import Interface, is_loopback, outward

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
