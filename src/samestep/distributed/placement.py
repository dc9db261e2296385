"""This process's place in the run and its device: decided once, every value with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from samestep.config import DistributedConfig
from samestep.config.schema import Same
from samestep.environment.fact import Fact
from samestep.environment.hardware import Hardware
from samestep.environment.launch import LaunchFacts
from samestep.errors import LaunchError
from samestep.words import counted


@dataclass(frozen=True)
class Placement:
    """The resolved form of the `distributed:` section on this process."""

    world: Fact[int]
    rank: Fact[int]
    local_rank: Fact[int]
    local_world: Fact[int]
    nodes: Fact[int]
    node_rank: Fact[int]
    device: Fact[str]
    backend: Fact[str]
    threads: Fact[int]
    master_addr: Fact[str | None]
    master_port: Fact[int | None]
    launcher: Fact[str]
    more_ports: tuple[int, ...] = ()
    """Where rank 0 listens if the first port is taken."""
    job: str | None = None
    """The name that the ranks of this launch share."""
    cpus_per_rank: Fact[int] | None = None
    """CPUs that the launcher reserved for each rank."""
    thread_limit: int | None = None
    """Threads that a container or a batch system leaves to each rank."""
    shares_cpus: bool = False
    """Whether `threads` is a share of this machine's CPUs, which the other ranks here may change."""
    one_machine: bool = False
    """Whether it is known, and not only assumed, that all ranks are on this machine."""

    @property
    def ports(self) -> tuple[int, ...]:
        """Return where rank 0 may listen."""
        assert self.master_port.value is not None, "checked for every world of several ranks"
        return (self.master_port.value, *self.more_ports)

    def rows(self) -> list[tuple[str, Any, str]]:
        """(config key, value, reason) for everything that `auto` was resolved to."""
        return [
            ("distributed.world_size", self.world.value, self.world.reason),
            ("distributed.rank", self.rank.value, self.rank.reason),
            ("distributed.num_nodes", self.nodes.value, self.nodes.reason),
            ("distributed.node_rank", self.node_rank.value, self.node_rank.reason),
            ("distributed.num_gpus_per_node", self.local_world.value, self.local_world.reason),
            ("distributed.device", self.device.value, self.device.reason),
            ("distributed.backend", self.backend.value, self.backend.reason),
            ("distributed.threads_per_rank", self.threads.value, self.threads.reason),
            ("distributed.master_addr", self.master_addr.value, self.master_addr.reason),
            ("distributed.master_port", self.master_port.value, self.master_port.reason),
        ]


def chosen_threads(
    config: DistributedConfig, requested: Fact[int] | None, on_cpu: bool, same: Same
) -> Fact[int] | None:
    """Return a rank's threads, unless they are its share of the machine's CPUs. Needs no torch.

    Args:
        config: Its `threads_per_rank` takes precedence.
        requested: What OMP_NUM_THREADS requests, if somebody set it.
        on_cpu: Whether the rank computes on the CPU, where threads change the last bit.
        same: The run's level of sameness.
    """
    if config.threads_per_rank != "auto":
        return Fact(config.threads_per_rank, "set in the config")
    if requested is not None:
        return requested
    if same == "bits" and on_cpu:
        return Fact(1, "same: bits on CPUs is one thread, whatever the machine has")
    return None


def share_of_a_rank(cpus: Fact[int], given: Fact[int] | None, local_world: int) -> Fact[int]:
    """Return a rank's share of the CPUs, as far as it knows before it has met the others."""
    if given is not None:
        return given if given.value <= cpus.value else cpus
    share = max(1, cpus.value // local_world)
    return Fact(share, f"{cpus.value} CPUs over {counted(local_world, 'rank')} here ({cpus.reason})")


def decide_placement(
    config: DistributedConfig, hardware: Hardware, launch: LaunchFacts, same: Same = "bits"
) -> Placement:
    """Resolve the section against the launcher and the machine; every contradiction at once."""
    return _Decision(config, hardware, launch, same).placement()


class _Decision:
    def __init__(self, config: DistributedConfig, hardware: Hardware, launch: LaunchFacts, same: Same) -> None:
        self.config, self.hardware, self.launch, self.same = config, hardware, launch, same
        self.mistakes: list[str] = []

    def placement(self) -> Placement:
        by_hand = not self.launch.external and self.config.rank != "auto"
        place = self._place_by_hand() if by_hand else self._place_by_launcher()
        world, rank, local_rank, local_world, nodes, node_rank = place
        if self.config.enabled is False and world.value > 1:
            self.mistakes.append(
                f"distributed.enabled is false but this process is rank {rank.value} of "
                f"{world.value}: {world.value} separate runs would write to one place. "
                "Start one process, or set enabled: auto"
            )
        device = self._device(local_rank.value, local_world.value)
        backend = self._backend(device.value, local_world.value)
        address, port = self._master(world.value, by_hand)
        on_cpu = device.value == "cpu"
        chosen = chosen_threads(self.config, self.launch.threads, on_cpu, self.same)
        share = share_of_a_rank(self.hardware.cpus, self.launch.cpus_per_rank, local_world.value)
        if self.mistakes:
            raise LaunchError("\n".join(self.mistakes))
        launcher = Fact(self.launch.launcher, self.launch.reasons["launcher"])
        return Placement(
            world,
            rank,
            local_rank,
            local_world,
            nodes,
            node_rank,
            device,
            backend,
            chosen or share,
            address,
            port,
            launcher,
            self.launch.more_ports if port.value == self.launch.master_port else (),
            self.launch.job,
            self.launch.cpus_per_rank,
            self._thread_limit(local_world.value),
            shares_cpus=chosen is None,
            one_machine=self.launch.external and nodes.value == 1 and not self.launch.local_world_is_guessed,
        )

    def _place_by_hand(self) -> tuple[Fact[int], ...]:
        config, why = self.config, "set in the config"
        world = 1 if config.world_size == "auto" else config.world_size
        rank = 0 if config.rank == "auto" else config.rank
        nodes = 1 if config.num_nodes == "auto" else config.num_nodes
        here = -(-world // nodes) if config.num_gpus_per_node == "auto" else config.num_gpus_per_node
        node = rank // here if config.node_rank == "auto" else config.node_rank
        numbers = (world, rank, rank % here, here, nodes, node)
        return tuple(Fact(number, why) for number in numbers)

    def _place_by_launcher(self) -> tuple[Fact[int], ...]:
        launch, config = self.launch, self.config
        if not launch.external and config.world_size not in ("auto", 1):
            self.mistakes.append(
                f"distributed.world_size is {config.world_size} but this process was started "
                f"alone: use samestep launch --nproc {config.world_size}, torchrun, mpirun or srun"
            )
        elif launch.external:
            self._agree("world_size", config.world_size, launch.world)
            self._agree("rank", config.rank, launch.rank)
            self._agree("num_nodes", config.num_nodes, launch.nodes)
            self._agree("node_rank", config.node_rank, launch.node_rank)
            self._agree("num_gpus_per_node", config.num_gpus_per_node, launch.local_world)
        names = ("world", "rank", "local_rank", "local_world", "nodes", "node_rank")
        return tuple(Fact(getattr(launch, name), launch.reasons[name]) for name in names)

    def _agree(self, key: str, configured: int | str, found: int) -> None:
        if configured not in ("auto", found):
            self.mistakes.append(
                f"distributed.{key} is {configured} but {found} according to {self.launch.launcher}: "
                f"set {key}: auto, or launch accordingly"
            )

    def _device(self, local_rank: int, local_world: int) -> Fact[str]:
        wanted, hardware = self.config.device, self.hardware
        if wanted == "cuda" and not hardware.cuda_available:
            self.mistakes.append(f"distributed.device is cuda but {hardware.cuda.reason}: set device: cpu or auto")
        if wanted == "cpu" or not hardware.cuda_available:
            return Fact("cpu", "set in the config" if wanted == "cpu" else hardware.cuda.reason)
        ids = self.config.device_ids
        if ids is None:
            # More ranks than GPUs: the backend decides whether that is possible (see _backend).
            index = local_rank % hardware.device_count
            return Fact(f"cuda:{index}", f"local rank {local_rank}, {hardware.cuda.reason}")
        if len(ids) < local_world:
            self.mistakes.append(
                f"distributed.device_ids names {len(ids)} GPUs for {local_world} ranks on this "
                "machine: name one per rank"
            )
            return Fact("cuda:0", "")
        if max(ids) >= hardware.device_count:
            self.mistakes.append(
                f"distributed.device_ids names GPU {max(ids)} but torch sees "
                f"{hardware.device_count}: ids run from 0 to {hardware.device_count - 1}"
            )
        return Fact(f"cuda:{ids[local_rank]}", f"device_ids, local rank {local_rank}")

    def _backend(self, device: str, local_world: int) -> Fact[str]:
        wanted, hardware = self.config.backend, self.hardware
        on_gpu = device.startswith("cuda")
        if wanted == "nccl" and not on_gpu:
            self.mistakes.append(
                f"distributed.backend is nccl, which needs GPUs, but this rank runs on the CPU "
                f"({hardware.cuda.reason}): set backend: gloo or auto"
            )
            return Fact("nccl", "")
        if wanted == "gloo" or not on_gpu:
            return Fact("gloo", "set in the config" if wanted == "gloo" else "ranks run on CPUs")
        if "nccl" not in hardware.backends:
            if wanted == "nccl":
                self.mistakes.append("distributed.backend is nccl but this torch is built without it: set gloo")
            return Fact("gloo", "this torch is built without nccl")
        # Slurm and MPI may show each rank only its own GPU: ranks compare once they have met.
        masked = self.launch.launcher not in ("none", "environment", "torchrun")
        masked = masked or (self.launch.external and self.launch.local_world_is_guessed)
        masked = masked or self.config.shares_gpus
        if local_world > hardware.device_count and not masked:
            self.mistakes.append(
                f"{local_world} ranks on this machine but torch sees {hardware.device_count} "
                "GPU(s), and nccl takes one rank per GPU. Start "
                f"{counted(hardware.device_count, 'rank')}, or set backend: gloo, or device: cpu"
            )
        return Fact("nccl", "set in the config" if wanted == "nccl" else "ranks run on GPUs")

    def _master(self, world: int, by_hand: bool) -> tuple[Fact[str | None], Fact[int | None]]:
        launch, config = self.launch, self.config
        address: Fact[str | None] = Fact(
            launch.master_addr, launch.reasons.get("master_addr", "one process needs none")
        )
        port: Fact[int | None] = Fact(launch.master_port, launch.reasons.get("master_port", "one process needs none"))
        if config.master_addr != "auto":
            address = Fact(config.master_addr, "set in the config")
        if config.master_port != "auto":
            port = Fact(config.master_port, "set in the config")
        if world > 1:
            for key, fact in (("master_addr", address), ("master_port", port)):
                if fact.value is None:
                    how = "ranks started manually" if by_hand else self.launch.launcher
                    self.mistakes.append(
                        f"distributed.{key} is auto, but {how} gave none: "
                        f"set {key.upper()} or distributed.{key} to the same on every rank"
                    )
        return address, port

    def _thread_limit(self, local_world: int) -> int | None:
        limit = self.hardware.cpu_limit
        return None if limit is None else max(1, limit.value // local_world)
