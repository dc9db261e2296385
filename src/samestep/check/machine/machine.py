"""Checks of one machine: pure functions of what it has and what the run needs of it."""

from __future__ import annotations

from samestep.check.machine.facts import Load, Machine, Space
from samestep.check.machine.findings import Finding, failure, note, ok, warning
from samestep.parsing.numbers import whole_number
from samestep.report.format import format_bytes
from samestep.words import counted

MB = 1024 * 1024
GB = 1024 * MB

_CONTAINER_DEFAULT = 64 * MB
"""The /dev/shm that Docker gives a container by default."""
_LOW_MEMORY = GB
"""Per rank: torch and its libraries alone take half of it."""
_LOW_DISK = GB


def check_machine(machine: Machine, load: Load) -> list[Finding]:
    """Everything about this machine that does not depend on other ranks."""
    return [
        check_versions(machine),
        check_gpus(machine, load),
        check_backend(machine, load),
        check_omp(machine, load),
        check_numa(machine, load),
        check_shared_memory(machine.shared_memory, load),
        check_memory(machine.memory, load),
        check_open_files(machine.open_files, load),
    ]


def check_versions(machine: Machine) -> Finding:
    """Return what is installed; whether the ranks agree is another check."""
    found = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    return ok("versions", f"{found}; {machine.processor}")


def check_gpus(machine: Machine, load: Load) -> Finding:
    """Return whether torch sees the GPUs of this machine."""
    check, hardware = "gpus", machine.hardware
    named = machine.variables.get("CUDA_VISIBLE_DEVICES")
    hidden = f"CUDA_VISIBLE_DEVICES={named}"
    if hardware.device_count:
        requested = len([part for part in (named or "").split(",") if part.strip()])
        if requested > hardware.device_count:
            return warning(
                check,
                f"{hidden} names {requested} GPUs but torch sees {hardware.device_count}",
                "CUDA stops reading the list at the first GPU that does not exist, and ranks are "
                "given the GPUs before it",
                "name only GPUs that nvidia-smi -L lists",
            )
        used = load.device if load.device == "cpu" else "one per rank"
        return ok(check, f"{', '.join(hardware.devices)}; ranks run on: {used}")
    if not machine.nvidia_devices:
        return ok(check, "none; ranks run on CPUs")
    there = f"{counted(machine.nvidia_devices, 'GPU')} under /dev"
    if "without CUDA" in hardware.cuda.reason:
        return warning(
            check,
            f"{there}, but {hardware.cuda.reason}",
            "training will run on the CPUs, and take many times as long",
            "install the CUDA build of torch (pytorch.org/get-started), or set "
            "distributed.device: cpu if that is intended",
        )
    if named is not None and (not named.strip() or named.strip().startswith("-")):
        return note(
            check,
            f"{there}, hidden by {hidden!r}",
            "training will run on the CPUs",
            "unset CUDA_VISIBLE_DEVICES to use the GPUs",
        )
    return warning(
        check,
        f"{there}, but {hardware.cuda.reason}",
        "training will run on the CPUs: the driver is too old for this torch, the container was "
        "started without its GPUs, or the job was given none",
        "compare nvidia-smi's CUDA version with torch.version.cuda; with Docker pass --gpus all, "
        "with Slurm request --gpus",
    )


def check_backend(machine: Machine, load: Load) -> Finding:
    """Return whether this torch has the backend that the ranks would use."""
    check, built = "backend", ", ".join(machine.hardware.backends) or "none"
    if load.world > 1 and load.backend not in machine.hardware.backends:
        return failure(
            check,
            f"{load.backend} is needed, but this torch has: {built}",
            "the process group cannot be opened",
            f"install a build of torch with {load.backend}",
        )
    return ok(check, f"{load.backend} for {load.device.split(':')[0]}; this torch has: {built}")


def check_omp(machine: Machine, load: Load) -> Finding:
    """Return whether OMP_NUM_THREADS contradicts the threads that a run gives each rank."""
    check, value = "omp threads", machine.variables.get("OMP_NUM_THREADS", "")
    threads = f"{counted(load.threads, 'thread')} per rank"
    number = whole_number(value)
    if number is None:
        return ok(check, f"OMP_NUM_THREADS is not set; {threads}")
    if number == load.threads:
        return ok(check, f"OMP_NUM_THREADS={value}, {threads}")
    by = ""
    if value == "1" and "TORCHELASTIC_RUN_ID" in machine.variables:
        by = " (torchrun sets 1 where nothing else was set)"
    advice = f"export OMP_NUM_THREADS={load.threads} before the launch, or leave it unset: the run sets it"
    if number * load.ranks_here > len(machine.cpus):
        return warning(
            check,
            f"OMP_NUM_THREADS={value} for {counted(load.ranks_here, 'rank')} on "
            f"{counted(len(machine.cpus), 'CPU')}, but {threads}",
            "libraries that read it when they are loaded start more threads than there are CPUs",
            advice,
        )
    arm = machine.processor.startswith(("aarch64", "arm"))
    whose = ": on ARM torch's linear is one of them, and its bits depend on it" if arm else ""
    return note(
        check,
        f"OMP_NUM_THREADS={value}{by}, but {threads}",
        "samestep train sets it before torch is loaded; in your own script, libraries that read it "
        f"when they are loaded stay at {value}{whose}",
        advice,
    )


def check_numa(machine: Machine, load: Load) -> Finding:
    """Return whether ranks stay near their memory, on a machine that has several parts."""
    check, parts = "numa", machine.numa
    if len(parts) < 2:
        return ok(check, "all CPUs have the same memory")
    used = [number for number, cpus in enumerate(parts) if set(cpus) & set(machine.cpus)]
    found = f"{len(parts)} NUMA nodes, this rank may run on {len(used)} of them"
    if len(used) < 2 or load.ranks_here < 2:
        return ok(check, found)
    return note(
        check,
        found,
        "a rank that moves to another NUMA node reads its memory, and its GPU's, from a distance",
        "bind ranks to nodes: srun --cpu-bind=ldoms (or cores), mpirun --map-by numa --bind-to numa, "
        "or numactl --cpunodebind around samestep train",
    )


def check_cpus(cpus: int, quota: float | None, ranks: int, threads: int, workers: int) -> Finding:
    """Return whether a machine's ranks fit its CPUs; threads and workers are those of all of them."""
    check = "cpus"
    usable = cpus if quota is None else min(cpus, quota)
    have = counted(cpus, "CPU")
    if quota is not None and quota < cpus:
        have += f", of which the container may use {quota:g},"
    if ranks > usable:
        return warning(
            check,
            f"{counted(ranks, 'rank')} on {have}",
            "ranks take turns, and every exchange waits for the one whose turn is last",
            f"start at most {max(1, int(usable))} here, or request more CPUs (sbatch --cpus-per-task, docker --cpus)",
        )
    if threads > usable:
        return warning(
            check,
            f"{counted(ranks, 'rank')} with {threads} threads in all on {have}",
            "threads that take turns are slower than fewer threads",
            f"set distributed.threads_per_rank to {max(1, int(usable // ranks))}",
        )
    if workers > usable:
        return warning(
            check,
            f"{workers} loader workers in all (loader.workers x ranks here) on {have}",
            "workers that take turns with the ranks make every step wait for its data",
            f"set loader.workers to {int(usable // ranks)} or fewer",
        )
    also = f", {counted(workers, 'loader worker')}" if workers else ""
    return ok(check, f"{have} for {counted(ranks, 'rank')}, {counted(threads, 'thread')}{also}")


def check_shared_memory(shared: Space | None, load: Load) -> Finding:
    """Return whether /dev/shm holds what loader workers and nccl pass through it."""
    check, workers = "/dev/shm", load.workers * load.ranks_here
    if shared is None:
        return ok(check, "this machine has none")
    found = f"{format_bytes(shared.free)} free of {format_bytes(shared.total)}"
    advice = "docker run --shm-size=8g (or --ipc=host), or loader.workers: 0"
    if workers and shared.free <= _CONTAINER_DEFAULT:
        return Finding(
            check,
            "error" if workers >= 4 else "warning",
            f"{found} for {counted(workers, 'loader worker')}",
            "loader workers keep their batches there: when it is full, they die of bus errors",
            advice,
        )
    if load.backend == "nccl" and load.ranks_here > 1 and shared.free <= _CONTAINER_DEFAULT:
        return warning(
            check,
            f"{found} for {load.ranks_here} ranks over nccl",
            "nccl keeps its buffers between the ranks of a machine there, and fails to start",
            advice,
        )
    if shared.free <= _CONTAINER_DEFAULT:
        return note(
            check,
            found,
            "it is enough only as long as there are no loader workers: with them it fills up, "
            "and they die of bus errors",
            advice,
        )
    return ok(check, found)


def check_memory(memory: Space, load: Load) -> Finding:
    """Return whether the ranks of this machine have enough memory to start."""
    check = "memory"
    if memory.free < _LOW_MEMORY * load.ranks_here:
        return warning(
            check,
            f"{format_bytes(memory.free)} free of {format_bytes(memory.total)} for {counted(load.ranks_here, 'rank')}",
            "a rank takes half a gigabyte before it has a model; the kernel silently kills what does not fit",
            "start fewer ranks here, or request more memory (sbatch --mem, docker --memory)",
        )
    return ok(check, f"{format_bytes(memory.total)} for {counted(load.ranks_here, 'rank')}")


def check_open_files(limits: tuple[int, int], load: Load) -> Finding:
    """Return whether a rank may open a socket to each other rank, and a file per tensor in flight."""
    check = "open files"
    soft, hard = (float("inf") if limit < 0 else limit for limit in limits)
    needed = 256 + 2 * load.world + 16 * load.workers * load.prefetch
    if soft >= needed:
        return ok(check, "unlimited" if soft == float("inf") else f"{soft:g} allowed")
    raised = max(needed, 4096)
    how = f"ulimit -n {raised} before the launch"
    if hard < needed:
        how = f"ask the administrator: the hard limit is {hard:g} (limits.conf, LimitNOFILE)"
    return warning(
        check,
        f"{soft:g} allowed, about {needed} needed",
        "a rank holds a socket to every other rank, and loader workers pass every tensor as an "
        "open file: beyond the limit, workers die with 'Too many open files'",
        how,
    )


def check_disk(folder: str, space: Space | None, refusal: str) -> Finding:
    """Return whether a run could write to its folder; `refusal` is the error of the attempt."""
    check = "run folder"
    if refusal:
        return failure(
            check,
            f"{folder} cannot be written to: {refusal}",
            "every rank writes its log there, and rank 0 the checkpoints",
            "set run_dir to a folder that you may write to",
        )
    if space is not None and space.free < _LOW_DISK:
        return warning(
            check,
            f"{format_bytes(space.free)} free at {folder}",
            "a checkpoint that does not fit ends the run",
            "free some space, or set run_dir to another file system",
        )
    free = "" if space is None else f", {format_bytes(space.free)} free"
    return ok(check, f"{folder} can be written to{free}")
