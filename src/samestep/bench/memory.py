"""Measures what a training's memory consists of, what lanes cost, and leaks."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import psutil
from torch import Tensor

from samestep.bench.document import Document, machine_facts
from samestep.bench.leak import LEAST_GROWTH, LEAST_RESIDENT_GROWTH, Growth, growth_of
from samestep.bench.memory_meter import AllocatorMeter, MemorySampler, StepMemory, TensorMeter, bytes_of, metered
from samestep.bench.short_runs import Trials, backend_of, training_facts, trials
from samestep.bench.statistics import spread_of
from samestep.config import Config
from samestep.distributed.context import RunContext
from samestep.errors import PlanError
from samestep.run.run import Run
from samestep.tracking.progress import CountedProgress
from samestep.words import counted

_SMALL_OBJECT = 64
"""About what one of Python's own small objects takes: their allocator counts them, not their bytes."""

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _MallocInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def resident() -> int:
    """Bytes that the system has given to the process.

    They move by themselves: the allocator keeps pages that are free, and returns some.
    """
    return int(psutil.Process().memory_info().rss)


def in_use() -> int | None:
    """Bytes that the process has asked for and not freed: of malloc, of Python, and shared ones.

    None where the C library does not tell, which is any but glibc 2.33 or later. What other allocators
    take from the system is not in it, such as mimalloc, which torch has for tensors on ARM.
    """
    malloc = _malloc_info()
    if malloc is None:
        return None
    stats = malloc()
    shared = int(getattr(psutil.Process().memory_info(), "shared", 0))
    small = sys.getallocatedblocks() * _SMALL_OBJECT
    return int(stats.uordblks) + int(stats.hblkhd) + shared + small


@cache
def _malloc_info() -> Callable[[], _MallocInfo] | None:
    try:
        found = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    found.restype, found.argtypes = _MallocInfo, []
    return found


KIND = "memory"
PARTS = ("weights", "gradients", "optimizer", "buffers", "activations", "exchange", "total")
_WARM_UP = 3
"""Steps before memory is read: optimizers keep nothing before the first, DDP sorts its buckets after it."""
_STEPS = 5
"""Steps whose memory is read."""


def measure_memory(config: Config, context: RunContext, lanes_per_rank: Sequence[int], leak_steps: int) -> Document:
    """Measure what a task's training holds; every rank calls this and gets the same. No leak test with 0 steps."""
    lanes = possible_lanes(config, context.world, lanes_per_rank)
    rows: list[dict[str, Any]] = []
    turns = len(lanes) + bool(leak_steps)
    with trials(config, context) as opened, CountedProgress("turn", turns, context.log, context.is_main) as progress:
        for count in lanes:
            progress.begin(f"{counted(count, 'lane')} a rank")
            rows += _part_rows(opened, count)
            progress.add()
        if leak_steps:
            progress.begin(f"{leak_steps} steps, for leaks")
            rows += _leak_rows(opened, lanes[0], leak_steps)
            progress.add()
    facts = machine_facts(str(context.device), context.hosts) | training_facts(config)
    return Document(KIND, facts, rows)


def possible_lanes(config: Config, world: int, wanted: Sequence[int]) -> list[int]:
    """Return the numbers of lanes of a rank that cut the global batch.

    Raises:
        PlanError: if none does.
    """
    if config.batch_per_rank is not None:
        return [config.batch_plan(world).lane_count // world]
    whole = config.batch_plan(world).global_batch
    found = [count for count in wanted if whole % (count * world) == 0]
    if not found:
        raise PlanError(
            f"no number of lanes that was asked for ({', '.join(map(str, wanted))} per rank, on "
            f"{counted(world, 'rank')}) divides a global_batch of {whole}: give others by --lanes-per-rank"
        )
    return found


def _part_rows(opened: Trials, lanes_per_rank: int) -> list[dict[str, Any]]:
    held = _read_parts(opened, lanes_per_rank)
    context = opened.context
    mine = {name: [step[name] for step in held] for name in PARTS}
    by_rank = context.gather(mine)
    return [
        {
            "world": context.world,
            "backend": backend_of(context),
            "lanes_per_rank": lanes_per_rank,
            "part": part,
            **_measured([rank[part] for rank in by_rank]),
            "ranks": [
                {"rank": rank, "host": host, **_measured([by_rank[rank][part]])}
                for rank, host in enumerate(context.hosts)
            ],
        }
        for part in PARTS
    ]


def _measured(by_rank: Sequence[Sequence[int | None]]) -> dict[str, Any]:
    """Return the rank that holds most; from the least to the most of all steps of all ranks."""
    values = [[value for value in rank if value is not None] for rank in by_rank]
    if not all(values):
        return {"measured_bytes": None, "low": None, "high": None}
    every = [value for rank in values for value in rank]
    most = max(spread_of(rank).median for rank in values)
    return {"measured_bytes": int(most), "low": min(every), "high": max(every)}


def _read_parts(opened: Trials, lanes_per_rank: int) -> list[dict[str, int | None]]:
    """Return what a run of so many lanes held in some steps."""
    context, device = opened.context, opened.context.device
    speed = opened.config.speed
    # A graph holds its memory for as long as it lives, and a compiled step is not seen through.
    changes = {"graph": False} if device.type == "cuda" else {"graph": False, "compile": False}
    gc.collect()
    with metered(device) as meter, opened.run(lanes_per_rank, speed=speed.model_copy(update=changes)) as run:
        sampler = MemorySampler(meter, copies=device.type == "cuda")
        run.watch_lanes(sampler)
        run.add_listener(sampler)
        by_tree = opened.config.same == "bits" or context.world == 1
        held = []
        with opened.steps(run) as steps:
            for number in range(_WARM_UP + _STEPS):
                sampler.begin()
                next(steps)
                weights = run.setup.gathered.weights
                if number == 0 and weights is not None:
                    weights.watch_memory(meter.resized)
                if number >= _WARM_UP:
                    found = sampler.finished()
                    held.append(_classify(run, meter, found, opened.task.has_batch_loss, by_tree))
    return held


def _classify(
    run: Run, meter: TensorMeter | AllocatorMeter, found: StepMemory, whole_batch: bool, by_tree: bool
) -> dict[str, int | None]:
    """Return what holds the memory between two steps, and what came and went in the step."""
    state = run.state
    weights = bytes_of([param for module in state.modules for param in module.parameters()])
    buffers = bytes_of([buffer for module in state.modules for buffer in module.buffers()])
    optimizer = bytes_of(list(_state_tensors(run)))
    own = sum(grad.nbytes for grad in _gradients(run) if _owns_its_memory(grad))
    between = meter.held() - found.batches
    return {
        "weights": weights,
        "buffers": buffers,
        "optimizer": optimizer,
        "exchange": max(0, between - weights - buffers - optimizer - own),
        # A loss over the whole batch passes over the lanes twice: they cannot be distinguished.
        "gradients": None if whole_batch else found.gradients(by_tree),
        "activations": None if whole_batch else found.activations,
        "total": found.peak,
    }


def _state_tensors(run: Run) -> Iterator[Tensor]:
    for optimizer in run.state.optimizers:
        for kept in optimizer.state.values():
            yield from (value for value in kept.values() if isinstance(value, Tensor))


def _gradients(run: Run) -> Iterator[Tensor]:
    for module in run.state.modules:
        yield from (param.grad for param in module.parameters() if param.grad is not None)


def _owns_its_memory(tensor: Tensor) -> bool:
    """Return whether it is no part of a bucket."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


# -- leaks ----------------------------------------------------------------------------------


def _leak_rows(opened: Trials, lanes_per_rank: int, steps: int) -> list[dict[str, Any]]:
    context, speed = opened.context, opened.config.speed
    held: dict[str, list[int]] = defaultdict(list)
    # Tensors on CPUs are counted operation by operation, and a compiled step has none to see.
    changes = {} if context.device.type == "cuda" else {"compile": False}
    with (
        metered(context.device) as meter,
        opened.run(lanes_per_rank, speed=speed.model_copy(update=changes)) as run,
        opened.steps(run) as taken,
    ):
        for _ in range(steps):
            next(taken)
            held["tensors"].append(meter.held())
            held["resident"].append(resident())
            used = in_use()
            if used is not None:
                held["host"].append(used)
    mine: dict[str, Growth] = {
        where: growth_of(sizes, LEAST_RESIDENT_GROWTH if where == "resident" else LEAST_GROWTH)
        for where, sizes in held.items()
    }
    return [
        {
            "world": context.world,
            "backend": backend_of(context),
            "leak": {
                "memory": where,
                "steps": growth.steps,
                "slope_bytes_per_step": growth.slope.median,
                "low": growth.slope.low,
                "high": growth.slope.high,
                "leaks": growth.leaks,
                "rank": rank,
                "host": context.hosts[rank],
            },
        }
        for rank, found in enumerate(context.gather(mine))
        for where, growth in found.items()
    ]
