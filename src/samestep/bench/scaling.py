"""Times a step on the ranks that are there: samestep and other loops interleaved, on one task."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from samestep.bench.baselines import Advance, LoopContext, Unsupported, open_ddp, open_samestep
from samestep.bench.document import Document, machine_facts
from samestep.bench.scaling_plan import DDP, KIND, MODES, SAMESTEP, ScalingRequest
from samestep.bench.scaling_report import Cores, RankStep, phases_of, share_cores, slow_ranks
from samestep.bench.short_runs import backend_of
from samestep.bench.statistics import ratio_of, spread_of
from samestep.bench.workloads import WorkloadTask, workload_of
from samestep.config import Config
from samestep.distributed.context import RunContext
from samestep.distributed.hardware import detect_hardware
from samestep.distributed.health.activity import COMPUTE, DATA, EXCHANGE, READING, UPDATE, Activity
from samestep.distributed.signals import stopping_at_once
from samestep.distributed.timed_calls import synchronize
from samestep.environment.hardware import allowed_cpus, owned_cpus
from samestep.environment.variables import process_environment
from samestep.errors import TaskError
from samestep.lanes.plan import BatchPlan
from samestep.optim.kernels import put_back, torch_settings
from samestep.report.run_facts import config_fact
from samestep.run.run import Run
from samestep.tracking.progress import CountedProgress
from samestep.tracking.step_times import peak_memory
from samestep.train.quiet_run import reading_once
from samestep.train.task import Task, load_task


class KeepingSettings:
    """A training that has its own settings of torch in its turns and leaves others theirs."""

    def __init__(self, open_it: Callable[[], Advance]) -> None:
        outside = torch_settings()
        try:
            self._advance = open_it()
            self._own = torch_settings()
        finally:
            put_back(outside)

    def __call__(self, number: int) -> None:
        """Run so many steps."""
        outside = torch_settings()
        if self._own != outside:
            put_back(self._own)
        try:
            self._advance(number)
        finally:
            self._own = torch_settings()
            if self._own != outside:
                put_back(outside)


_WARM_UP = {"cuda": 24}
"""Steps before the clock starts. On a GPU steps run eagerly at first, then are captured as graphs."""
_WARM_UP_ELSEWHERE = 3
_FEWEST, _MOST = 2, 200
"""Timed steps of a turn."""


def measure_scaling(request: ScalingRequest, config: Config, context: RunContext) -> Document:
    """Time the steps of a task on these ranks; every rank calls this and gets the same."""
    request = replace(request, most_ranks=max(request.most_ranks, context.world))
    if request.workload is None:
        facts, lane_batch, workload = config_fact(config) | {"task": config.task or ""}, 1, None
        loaded = reading_once(load_task(config))
    else:
        workload = workload_of(request.workload, request.size)
        facts, lane_batch = {"config": "built-in", "task": f"{request.workload}-{request.size}"}, workload.batch
    named = config.name if workload is None else facts["task"]
    rows = []
    turns = len(MODES[request.mode]) * (request.turns + 1) * (len(request.running) + 1)
    with (
        stopping_at_once("the measurement", context.log.main) as check_stop,
        CountedProgress("turn", turns, context.log, context.is_main) as progress,
    ):
        for mode in MODES[request.mode]:
            plan = request.plan(config, lane_batch, mode, context.world)
            task = loaded if workload is None else reading_once(WorkloadTask(workload, plan.global_batch))
            with TemporaryDirectory(prefix="samestep-scaling-", ignore_cleanup_errors=True) as folder:
                found = _Measuring(config, context, request, named, mode, plan, Path(folder))
                rows += found.measure(task, progress, check_stop)
            gc.collect()
    machine = machine_facts(str(context.device), context.hosts)
    return Document(KIND, machine | facts, rows)


class _Measuring:
    """One mode on this rank and the others."""

    def __init__(
        self,
        config: Config,
        context: RunContext,
        request: ScalingRequest,
        workload: str,
        mode: str,
        plan: BatchPlan,
        folder: Path,
    ) -> None:
        changes = {"global_batch": plan.global_batch, "lanes": plan.lane_count, "batch_per_rank": None}
        self._config = config.model_copy(update=changes)
        self._context, self._request, self._folder = context, request, folder
        self._workload, self._mode, self._plan = workload, mode, plan
        self._hardware = detect_hardware()
        self._turns: dict[str, Advance] = {}
        self._left_out: dict[str, str] = {}
        self._samestep: dict[str, Any] = {}
        """What is known of samestep's own steps only."""

    def measure(self, task: Task, progress: CountedProgress, check_stop: Callable[[], None]) -> list[dict[str, Any]]:
        """Rows, one for each variant."""
        with ExitStack() as stack:
            refuse_small_data(task, self._plan.global_batch)
            for name in (*self._request.running, self._control):
                progress.begin(name)
                folder = self._folder / name
                self._open(name, LoopContext(task, self._config, self._context, self._hardware, folder, stack))
                progress.add()
                check_stop()
            # Otherwise a collection of everything the libraries allocated falls into someone's turn.
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
            seconds = self._take_turns(progress, check_stop)
        return self._rows(seconds)

    @property
    def _control(self) -> str:
        """The variant that runs twice."""
        return f"{DDP if DDP in self._request.running else SAMESTEP} again"

    def _open(self, name: str, loop: LoopContext) -> None:
        kind = name.removesuffix(" again")
        warm_up = _WARM_UP.get(self._context.device.type, _WARM_UP_ELSEWHERE)
        if kind in self._left_out:
            return
        if kind == SAMESTEP:
            self._turns[name] = KeepingSettings(lambda: self._opened_samestep(name, loop, warm_up))
            return
        try:
            self._turns[name] = KeepingSettings(partial(open_ddp, loop))
        except Unsupported as why:
            self._left_out[name] = str(why)
            return
        self._turns[name](warm_up)

    def _opened_samestep(self, name: str, loop: LoopContext, warm_up: int) -> Advance:
        device = self._context.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        advance, run = open_samestep(loop)
        advance(warm_up)
        if name == SAMESTEP:
            # The first to be opened: nobody else's memory is there yet.
            self._instrument(advance, run, peak_memory(device))
        return advance

    def _instrument(self, advance: Advance, run: Run, memory: int) -> None:
        """Time the phases of some steps, apart from those whose time counts."""
        context = self._context
        taken = _timed_phases(run.context.activity, context.device, advance, self._request.instrumented)
        steps = list(zip(*context.gather(taken), strict=True))
        cpus = owned_cpus(process_environment()).value
        cores = Cores(context.hosts[context.rank], allowed_cpus(), cpus, context.threads)
        ranks = context.gather((cores, memory))
        computes = [spread_of([step[rank].compute for step in steps]) for rank in range(len(ranks))]
        self._samestep = {
            "phases": {name: asdict(spread) for name, spread in phases_of(steps).items()},
            "ranks": [
                {"rank": rank, "host": one.host, "compute": computes[rank].median, "memory_bytes": most}
                for rank, (one, most) in enumerate(ranks)
            ],
            "slow_ranks": slow_ranks(steps),
            "precision": run.setup.precision.kind,
            "shares_cores": context.device.type == "cpu" and share_cores([one for one, _ in ranks]),
        }

    def _take_turns(self, progress: CountedProgress, check_stop: Callable[[], None]) -> dict[str, list[float]]:
        """Seconds of a step in each round; who is first rotates."""
        names = list(self._turns)
        once = self._seconds(names[0], _FEWEST)
        steps = self._context.broadcast(max(_FEWEST, min(_MOST, round(self._request.turn_seconds / once))))
        taken: dict[str, list[float]] = {name: [] for name in names}
        for number in range(self._request.turns):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                progress.begin(name)
                taken[name].append(self._seconds(name, steps))
                progress.add()
            check_stop()
        return taken

    def _seconds(self, name: str, steps: int) -> float:
        """Return the seconds of a step, on the slowest rank."""
        device = self._context.device
        synchronize(device)
        self._context.barrier()
        began = time.perf_counter()
        self._turns[name](steps)
        synchronize(device)
        return max(self._context.gather((time.perf_counter() - began) / steps))

    def _rows(self, taken: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
        plan, control = self._plan, self._control
        twice = control.removesuffix(" again")
        noise = asdict(ratio_of(taken[twice], taken[control])) if control in taken else None
        shared = {
            "mode": self._mode,
            "workload": self._workload,
            "world": self._context.world,
            "backend": backend_of(self._context),
            "lanes": plan.lane_count,
            "global_batch": plan.global_batch,
            "precision": self._samestep["precision"],
            "shares_cores": self._samestep["shares_cores"],
            "control": noise,
            "left_out": dict(self._left_out),
            "efficiency": None,
        }
        rows = []
        for name in [name for name in taken if name != control]:
            spread = spread_of(taken[name])
            ours = name == SAMESTEP
            rows.append({
                **shared,
                "variant": name,
                "seconds": list(taken[name]),
                **asdict(spread),
                "samples_per_second": plan.global_batch / spread.median,
                "ratio_to_ddp": asdict(ratio_of(taken[DDP], taken[name])) if DDP in taken else None,
                "phases": self._samestep["phases"] if ours else None,
                "ranks": self._samestep["ranks"] if ours else [],
                "slow_ranks": self._samestep["slow_ranks"] if ours else [],
            })  # fmt: skip
        return rows


def refuse_small_data(task: Task, global_batch: int) -> None:
    """Refuse data of which a step's batch cannot be drawn."""
    data = task.train_data()
    if hasattr(data, "__len__") and len(data) < global_batch:
        raise TaskError(
            f"the training data has {len(data)} samples, and a step of this world takes {global_batch}: "
            "use more data, a smaller global_batch, or --mode strong"
        )


def _timed_phases(activity: Activity, device: torch.device, advance: Advance, steps: int) -> list[RankStep]:
    """Seconds of each phase of each step on this rank; waits for the device between phases."""
    every = activity.timed_every
    activity.timed_every = 1
    activity.before_clock = lambda: _wait_unless_capturing(device)
    advance(1)
    found = []
    for _ in range(steps):
        activity.enter(activity.phase)
        before = dict(activity.seconds)
        advance(1)
        activity.enter(activity.phase)
        spent = {phase: activity.seconds[phase] - before[phase] for phase in before}
        found.append(RankStep(spent[DATA], spent[COMPUTE] + spent[READING], spent[EXCHANGE], spent[UPDATE]))
    activity.timed_every, activity.before_clock = every, None
    return found


def _wait_unless_capturing(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)
