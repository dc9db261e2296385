"""A measurement of scaling on the ranks that are there."""

from __future__ import annotations

from dataclasses import replace

from samestep.bench.document import Document
from samestep.bench.scaling import Trial, measure_scaling
from samestep.bench.scaling_plan import MODES, ScalingRequest
from samestep.bench.workloads import WorkloadTask, workload_of
from samestep.config import Config
from samestep.distributed.context import RunContext
from samestep.report.run_facts import config_fact
from samestep.train.quiet_run import reading_once
from samestep.train.task import Task, load_task


def measure_request(request: ScalingRequest, config: Config, context: RunContext) -> Document:
    """Measure this world; every rank calls this and gets the same."""
    request = replace(request, most_ranks=max(request.most_ranks, context.world))
    facts = {"config": "built-in", "task": f"{request.workload}-{request.size}"}
    lane_batch = 1
    if request.workload is None:
        facts = {**config_fact(config), "task": config.task or ""}
        task = reading_once(load_task(config))

        def task_of(global_batch: int) -> Task:
            return task
    else:
        workload = workload_of(request.workload, request.size)
        lane_batch = workload.batch

        def task_of(global_batch: int) -> Task:
            return reading_once(WorkloadTask(workload, global_batch))

    trial = Trial(
        workload=config.name if request.workload is None else facts["task"],
        modes=MODES[request.mode],
        batches=request.batches(config, lane_batch),
        variants=request.running,
        rounds=request.turns,
        seconds=request.turn_seconds,
        instrumented=request.instrumented,
    )
    found = measure_scaling(config, context, task_of, trial)
    return Document(found.kind, {**found.machine, **facts}, found.rows)
