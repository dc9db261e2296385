"""RunContext: this process's place in the run, opened once and closed on every path."""

from __future__ import annotations

import gc
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional

from samestep.config import Config, DistributedConfig
from samestep.config.schema import Same
from samestep.distributed.collectives import Collectives, SoloCollectives, TorchCollectives, group_is_open
from samestep.distributed.health.activity import Activity
from samestep.distributed.health.failure_report import report_end
from samestep.distributed.health.hang_report import Beat
from samestep.distributed.health.heartbeat import Heartbeat
from samestep.distributed.health.peer_errors import broken_collective
from samestep.distributed.logging import RankLog
from samestep.distributed.placement import Placement, chosen_threads, decide_placement
from samestep.distributed.process_group import open_process_group, patience
from samestep.environment.fact import Fact
from samestep.environment.hardware import Hardware
from samestep.environment.launch import LaunchFacts, detect_launch
from samestep.environment.secret import Signer, signer_of
from samestep.environment.variables import process_environment
from samestep.errors import InitError, LaunchError, PeerLost, Stopped
from samestep.lanes.plan import deal_lanes
from samestep.words import counted

# Imported here though unused: its functions take the process group that is open when it is
# imported as a default argument. The first optimizer imports it, by way of torch._dynamo, and
# would keep the group and its threads alive until they fail at the interpreter's exit.
assert torch.distributed.nn.functional

T = TypeVar("T")


class RunContext(ABC):
    """One process of a run: its rank, its device, and its connection to the other ranks.

    `create_run_context` makes one, and `Run.context` is the one of a run. Use it as a context
    manager: on any error it notifies the other ranks, and closes what it opened.

        with samestep.create_run_context(config, samestep.detect_hardware()) as context:
            with context.rank0_first():
                dataset = download()
            if context.is_main:
                print(f"training on {context.world} ranks")

    Attributes:
        rank: This process's number, from 0 to `world - 1`.
        world: The number of processes of the run.
        is_main: Whether this is rank 0, which writes what the run writes once.
        local_rank: This process's number on its machine.
        device: Where this process computes.
        threads: Threads of this process, as set in torch.
        hosts: The host name of every rank.
        log: Lines for the terminal and for this rank's log file.
    """

    def __init__(self, collectives: Collectives, device: torch.device, local_rank: int, threads: int) -> None:
        self.collectives = collectives
        self.activity = collectives.activity
        self.device = device
        self.local_rank = local_rank
        self.log = RankLog(collectives.rank, collectives.world)
        self._turns = 0
        self._undo: list[Callable[[], None]] = []
        self.hosts: Sequence[str] = [socket.gethostname()]
        before = torch.get_num_threads()
        self.on_close(lambda: torch.set_num_threads(before))
        self.use_threads(threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def use_threads(self, threads: int) -> None:
        """Compute with this many threads from now on."""
        self.threads = threads
        torch.set_num_threads(threads)

    @property
    def rank(self) -> int:
        """This process's number, from 0 to `world - 1`."""
        return self.collectives.rank

    @property
    def world(self) -> int:
        """The number of processes of the run."""
        return self.collectives.world

    @property
    def is_main(self) -> bool:
        """Return whether this process writes what the run writes once."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.collectives.barrier()

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the object of the source rank, on every rank; the others' own values are ignored."""
        return self.collectives.broadcast(value, source)

    def gather(self, value: T) -> list[T]:
        """Return every rank's object, in rank order, on every rank. Objects are pickled."""
        return self.collectives.gather(value)

    @contextmanager
    def rank0_first(self, per: Literal["node", "run"] = "node") -> Iterator[bool]:
        """Let one rank of each node, or of the run, execute a block before the others.

        For what should happen once, such as a download: the others then find it done. They wait
        however long it takes.

            with context.rank0_first(per="run") as first:
                if first:
                    prepare_files()
                dataset = open_files()

        Args:
            per: Whether the first rank of each `"node"` goes first, or only rank 0 of the `"run"`.

        Yields:
            Whether this rank is the first.
        """
        host = self.hosts[self.rank]
        first = self.hosts.index(host) if per == "node" else 0
        self._turns += 1
        event = f"{self._turns} of {host if per == 'node' else 'the run'}"
        if self.rank != first:
            self.wait_for(event, first)
        yield self.rank == first
        if self.rank == first:
            self.notify(event)

    @abstractmethod
    def notify(self, event: str) -> None:
        """Release the ranks that wait for this event."""

    @abstractmethod
    def wait_for(self, event: str, rank: int) -> None:
        """Wait until a rank notifies the others of this event."""

    def log_to(self, folder: Path, append: bool) -> None:
        """Also write to this rank's log file in the folder from here on."""
        self.log.to_file(folder, append)

    def before_end(self, finish: Callable[[], None]) -> None:
        """Set what must be finished before this process may be ended because another rank failed."""
        del finish  # nobody ends a process that is alone

    def is_gone(self, rank: int) -> bool:
        """Return whether another rank has ended, or is not heard from any more. From any thread."""
        return rank != self.rank  # a process alone has no others

    def beats(self) -> list[Beat]:
        """Return every rank's last sign of life, as far as there is one. From any thread."""
        return [Beat.of(self.activity, self.rank, self.hosts[self.rank])]

    def failed(self, error: BaseException) -> BaseException:
        """Notify the other ranks that this one fails; returns what the error really means."""
        return error

    def on_close(self, undo: Callable[[], None]) -> None:
        """Call this when the context is closed, before what was given earlier."""
        self._undo.append(undo)

    def close(self) -> None:
        """Release what the context opened. Safe to call twice."""
        while self._undo:
            self._undo.pop()()
        self.log.close()
        report_end()

    def __enter__(self) -> RunContext:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        meant = error if error is None else self.failed(error)
        self.close()
        if meant is not error and meant is not None:
            raise meant from error


class SingleProcessContext(RunContext):
    """A world of one: every lane is driven here and nothing is exchanged."""

    def __init__(self, device: torch.device | str = "cpu", threads: int | None = None) -> None:
        super().__init__(SoloCollectives(Activity()), torch.device(device), 0, threads or torch.get_num_threads())

    def notify(self, event: str) -> None:
        del event  # nobody waits for it

    def wait_for(self, event: str, rank: int) -> None:
        raise AssertionError(f"a single process cannot wait for {event} of rank {rank}")


class DDPContext(RunContext):
    """One of several ranks, over a process group it opened or found open."""

    collectives: TorchCollectives

    def __init__(
        self,
        device: torch.device,
        local_rank: int,
        threads: int,
        section: DistributedConfig,
        owned: bool,
        hosts: Sequence[str] | None = None,
        signer: Signer | None = None,
    ) -> None:
        found = TorchCollectives(device, Activity(), signer, patience(section))
        super().__init__(found, device, local_rank, threads)
        self.hosts = self.gather(socket.gethostname()) if hosts is None else hosts
        self._owned, self._failed = owned, False
        self._heartbeat = Heartbeat(
            dist.distributed_c10d._get_default_store(), self.rank, self.world, self.activity, section.timeout,
            section.lost_after, signer_of(process_environment(), "heartbeats"),
        )  # fmt: skip

    def log_to(self, folder: Path, append: bool) -> None:
        super().log_to(folder, append)
        if self.log.stream is not None:
            self._heartbeat.dump_stacks_to(self.log.stream)

    def before_end(self, finish: Callable[[], None]) -> None:
        self._heartbeat.before_end(finish)

    def notify(self, event: str) -> None:
        self._heartbeat.notify(event)

    def wait_for(self, event: str, rank: int) -> None:
        self._heartbeat.wait_for(event, rank)

    def is_gone(self, rank: int) -> bool:
        return self._heartbeat.is_gone(rank)

    def beats(self) -> list[Beat]:
        return [beat for beat, _ in self._heartbeat.beats()]

    def failed(self, error: BaseException) -> BaseException:
        """Notify the other ranks of a failure here; or find out why they broke a collective."""
        if self._failed or isinstance(error, (Stopped, SystemExit)):
            return error
        self._failed = True
        lost, trace = broken_collective(error)
        if lost is None:
            self._heartbeat.announce(error)
            return error
        meant = self._heartbeat.explain(lost, trace)
        if not isinstance(meant, PeerLost):
            self._heartbeat.announce(meant)  # so that the rank that hangs ends, too
        return meant

    def close(self) -> None:
        self._heartbeat.stop()
        super().close()
        # Cycles of DistributedDataParallel's hold the group, whose threads must not outlive this.
        gc.collect()
        self.collectives.close_groups(not self._owned and not self._failed)
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()
        if self._failed:
            self._heartbeat.leave()
        self._heartbeat.close()


def create_run_context(
    config: Config | DistributedConfig,
    hardware: Hardware,
    launch: LaunchFacts | None = None,
    device: torch.device | None = None,
    same: Same = "bits",
    needs_lanes: bool = True,
) -> RunContext:
    """This process's context: a single process, or a rank of the process group that it opens.

    Which one, and where, follows from the config and from the variables that torchrun, mpirun or
    srun set. A process group that is already open is used, and left open.

        config = samestep.load_config("config.yaml")
        with samestep.create_run_context(config, samestep.detect_hardware()) as context:
            samestep.train_once(config, context)

    Args:
        config: A run's config, or its `distributed` section alone.
        hardware: What this machine has, from `detect_hardware`.
        launch: This process's place according to its launcher; by default from the environment.
        device: Where to compute, instead of what the config and the local rank decide.
        same: The level of sameness, for a `distributed` section alone.
        needs_lanes: Whether every rank must have a lane of the config's, as training requires.

    Raises:
        LaunchError: The config, the launcher and the machine contradict each other.
        PlanError: There are more ranks than lanes.
        InitError: The process group could not be opened.
    """
    section = config.distributed if isinstance(config, Config) else config
    same = config.same if isinstance(config, Config) else same
    if launch is None:
        launch = detect_launch(process_environment())
    if group_is_open():
        return _join_open_group(section, hardware, launch, device, same)
    if device is not None and device.type == "cpu":
        section = section.model_copy(update={"device": "cpu"})
    place = decide_placement(section, hardware, launch, same)
    if device is not None:
        place = replace(place, device=Fact(str(device), "chosen by the caller"))
    if isinstance(config, Config) and needs_lanes:
        # Every rank can refuse this by itself, before it waits for the others.
        world = place.world.value
        deal_lanes(config.lane_count(world), world, section.lane_weights)
    if place.world.value == 1:
        context: RunContext = SingleProcessContext(place.device.value, place.threads.value)
        context.log.main(
            f"One process on {place.device.value}, {counted(place.threads.value, 'thread')} "
            f"({place.launcher.reason}; {place.threads.reason})"
        )
        return context
    return _open_group(section, place)


def _join_open_group(
    section: DistributedConfig, hardware: Hardware, launch: LaunchFacts, device: torch.device | None, same: Same
) -> RunContext:
    world, rank = dist.get_world_size(), dist.get_rank()
    at = f"this process is rank {rank} of {world} of the open process group"
    if section.world_size not in ("auto", world):
        asked = f"distributed.world_size is {section.world_size}"
        raise LaunchError(f"{asked} but {at}: set world_size: auto")
    if section.rank not in ("auto", rank):
        raise LaunchError(f"distributed.rank is {section.rank} but {at}: set rank: auto")
    local_rank = launch.local_rank
    if device is None:
        gpu = dist.get_backend() == "nccl"
        device = torch.device(f"cuda:{local_rank % hardware.device_count}" if gpu else "cpu")
    chosen = chosen_threads(section, launch.threads, device.type == "cpu", same)
    threads = torch.get_num_threads() if chosen is None else chosen.value
    return DDPContext(device, local_rank, threads, section, owned=False)


def _open_group(section: DistributedConfig, place: Placement) -> RunContext:
    try:
        joined = open_process_group(section, place)
    except InitError as error:
        return _without_group(section, place, error)
    device, threads = torch.device(place.device.value), joined.threads
    signer = signer_of(process_environment(), f"objects of {joined.name}")
    context = DDPContext(device, place.local_rank.value, threads.value, section, True, joined.hosts, signer)
    context.log.main(
        f"Distributed training initialized: {place.backend.value} backend, "
        f"{place.world.value} processes on {counted(len(set(joined.hosts)), 'machine')}, {joined.cores} threads in all"
    )
    context.log.main(f"Master: {_master(place)}")
    context.log.everyone(
        f"local rank {place.local_rank.value} on {device} of {joined.hosts[context.rank]}, "
        f"{counted(threads.value, 'thread')}: {threads.reason}"
    )
    return context


def _master(place: Placement) -> str:
    return f"{place.master_addr.value}:{place.master_port.value}"


def _without_group(section: DistributedConfig, place: Placement, error: InitError) -> RunContext:
    rank, world, master = place.rank.value, place.world.value, _master(place)
    failure = (
        f"rank {rank} of {world} could not open the process group "
        f"({place.backend.value} at {master}, timeout {section.timeout:g} s): {error}"
    )
    if section.on_init_failure == "fail":
        raise InitError(
            f"{failure}. Check that all {world} ranks were started and can reach {master}; "
            "distributed.on_init_failure: fallback lets rank 0 continue alone"
        ) from error
    # Decided by rank, the same way everywhere: one run continues, never several.
    if rank != 0:
        RankLog(rank, world).warn(f"{failure}; rank 0 continues alone")
        sys.exit(0)
    context = SingleProcessContext(place.device.value, place.threads.value)
    context.log.main(f"{failure}. Continuing alone: distributed.on_init_failure is fallback")
    return context
