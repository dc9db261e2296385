"""The number of trials that run side by side on this machine, and the ranks and threads of each.

Decided once, before the first trial. Nothing of it changes what a trial comes to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.config import Config
from samestep.distributed.placement import chosen_threads, share_of_a_rank
from samestep.distributed.quick_hardware import quick_hardware
from samestep.environment.fact import Fact
from samestep.environment.hardware import expects_gpu
from samestep.environment.launch import requested_threads
from samestep.errors import LaunchError
from samestep.launch.commands.torchrun import default_nproc
from samestep.sweep.schema import SweepConfig
from samestep.words import counted


@dataclass(frozen=True)
class ResourcePlan:
    """Trials on the GPUs or CPUs of this machine."""

    parallel: int
    """Trials side by side."""
    ranks: int
    """Of each trial."""
    threads: int
    """Of each rank."""
    devices: tuple[str, ...] = ()
    """The GPUs that trials share out, as CUDA_VISIBLE_DEVICES names them; none if nothing is shared out."""
    summary: str = ""
    """All of it in a line, with what is too much."""

    def variables(self, slot: int) -> dict[str, str]:
        """Return what one of the trials side by side sees of the GPUs: as many as it has ranks, and none of another's."""
        if not self.devices:
            return {}
        mine = self.devices[slot * self.ranks : (slot + 1) * self.ranks]
        return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}


def pack(sweep: SweepConfig, base: Config, trials: int, environ: Mapping[str, str]) -> ResourcePlan:
    """Share this machine out to trials.

    Raises:
        LaunchError: if more GPUs are needed than there are.
    """
    hardware = quick_hardware(environ)
    gpus = 0 if base.distributed.device == "cpu" else hardware.device_count
    ranks = _ranks(sweep, base, gpus)
    threads = rank_threads(base, hardware.cpus, ranks, environ)
    fits = gpus // ranks if gpus else hardware.cpus.value // (ranks * threads.value)
    if sweep.parallel == "auto":
        rounds = sweep.round if sweep.deterministic else trials
        parallel = max(1, min(fits, rounds, trials))
    else:
        parallel = sweep.parallel
    if gpus and parallel * ranks > gpus:
        raise LaunchError(
            f"parallel is {parallel} with {counted(ranks, 'rank')} for each trial, and there are {gpus} GPUs: set "
            f"parallel: {max(1, fits)}, or ranks_per_trial: {max(1, gpus // parallel)}"
        )
    named = environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = named.split(",") if named else [str(number) for number in range(gpus)]
    shared = tuple(devices) if gpus and parallel > 1 else ()
    summary = _summary(parallel, ranks, threads, hardware.cpus, gpus)
    return ResourcePlan(parallel, ranks, threads.value, shared, summary)


def rank_threads(base: Config, cpus: Fact[int], ranks: int, environ: Mapping[str, str]) -> Fact[int]:
    """Return the threads of each rank of a run, as the run itself will choose them."""
    section = base.distributed
    on_cpu = section.device == "cpu" or not expects_gpu(environ)
    chosen = chosen_threads(section, requested_threads(environ), on_cpu, base.same)
    return chosen or share_of_a_rank(cpus, None, ranks)


def _ranks(sweep: SweepConfig, base: Config, gpus: int) -> int:
    if sweep.ranks_per_trial == "all":
        return default_nproc(base, gpus)
    if sweep.ranks_per_trial != "auto":
        return sweep.ranks_per_trial
    world = base.distributed.world_size
    return 1 if world == "auto" else world


def _summary(parallel: int, ranks: int, threads: Fact[int], cpus: Fact[int], gpus: int) -> str:
    """One line: what runs at once, and whether that is more than there is."""
    needed = parallel * ranks * threads.value
    line = (
        f"{counted(parallel, 'trial')} side by side, {counted(ranks, 'rank')} each, {counted(threads.value, 'thread')} each rank "
        f"({threads.reason})"
    )
    if gpus:
        line += f", on {parallel * ranks} of {gpus} GPUs"
    if needed <= cpus.value:
        return f"{line}: {needed} of {cpus.value} CPUs"
    fix = max(1, cpus.value // (parallel * ranks))
    return (
        f"{line}: {needed} threads on {cpus.value} CPUs ({cpus.reason}), so that they wait for each other. Set "
        f"distributed.threads_per_rank: {fix} in the base" + ("" if parallel == 1 else ", or a lower parallel")
    )
