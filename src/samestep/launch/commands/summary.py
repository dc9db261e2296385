"""A summary of a launch, as rows for a person to read before it starts. No torch here."""

from __future__ import annotations

from typing import Any

from samestep.config import Config
from samestep.lanes.plan import deal_lanes
from samestep.words import counted

Rows = list[tuple[str, Any]]


def plan_rows(
    config: Config, world: int | None, machines: int, threads: int | None, threads_are_share: bool = False
) -> Rows:
    """(what, how many): ranks, lanes, batch and threads; `None` is decided on the machines.

    Args:
        threads_are_share: Whether `threads` are its CPUs, which it uses beside a GPU only if
            `same: bits`.
    """
    rows: Rows = [
        ("run directory", config.run_path),
        ("machines", machines),
        ("ranks", "one for each GPU" if world is None else world),
    ]
    lane_count = config.lane_count(1 if world is None else world)
    if world is not None:
        assignment = deal_lanes(lane_count, world, config.distributed.lane_weights)
        counts = sorted({len(lanes) for lanes in assignment})
        shown = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        rows.append(("lanes", f"{lane_count}: {shown} for each rank"))
    elif config.batch_per_rank is None:
        rows.append(("lanes", lane_count))
    if config.leaves_batch_open:
        rows.append(("batch", "that of the script's DataLoader"))
    elif world is not None or config.global_batch is not None:
        batch = config.batch_plan(1 if world is None else world)
        rows.append(("batch", f"{batch.global_batch} samples a step, {batch.lane_batch} a lane"))
    configured = config.distributed.threads_per_rank
    share = "each rank's share of its machine's CPUs"
    if config.same == "bits":
        known = threads if threads_are_share and threads is not None else share
        share = f"1 on CPUs; beside a GPU {known}"
        threads = None if threads_are_share else threads
    threads = threads if configured == "auto" else configured
    rows.append(("threads for each rank", share if threads is None else threads))
    if threads is not None and world is not None:
        rows.append(("threads in all", threads * world))
    rows.append(("same", config.same))
    return rows + [("platform", note.removeprefix("Platform ")) for note in config.platform_notes]


def more_processes_may_help(config: Config, world: int, threads: int, cpus: int, on_gpu: bool) -> str:
    """Return a hint for a run in one process on many CPUs; empty for all others."""
    lane_count = config.lane_count(1)
    if on_gpu or world > 1 or lane_count == 1:
        return ""
    ranks = min(lane_count, cpus // threads)
    if config.same == "bits" and ranks > 1:
        return (
            f"One process computes with {counted(threads, 'thread')}, so that its bits are the same on any "
            f"machine. samestep launch in place of train uses {ranks * threads} of the {cpus} CPUs "
            f"here, as {ranks} ranks, with the same bits"
        )
    ranks = max((n for n in range(2, threads // 2 + 1) if lane_count % n == 0), default=1)
    if ranks == 1:
        return ""
    return (
        f"One process computes with {threads} threads. If the model is small, several processes with "
        f"fewer threads are faster, and the run is the same except for the threads' rounding: try "
        f"samestep launch --nproc {ranks}"
    )
