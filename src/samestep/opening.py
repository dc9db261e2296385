"""Opening a run: its directory locked, and where it goes on from, decided once for all ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.checkpoint.resume import ResumePoint, find_resume_point, refuse_another_run
from samestep.checkpoint.store import list_checkpoints
from samestep.config import Config
from samestep.folder import RunFolder
from samestep.plan import BatchPlan
from samestep.runtime.context import RunContext
from samestep.runtime.environment import process_environment


@dataclass(frozen=True)
class Opened:
    """What a run starts with."""

    folder: RunFolder | None
    """On rank 0, which holds its lock."""
    point: ResumePoint | None
    """Where it goes on from; None from the beginning."""


def open_run(config: Config, context: RunContext, batch: BatchPlan) -> Opened:
    """Lock the run's directory and make it ready; every rank learns the same."""
    folder, point = None, None
    if context.is_main:
        folder = RunFolder(config.run_path)
        point = find_resume_point(config, folder.path, context.log.warn)
        if point is not None:
            refuse_another_run(config, vars(batch), point)
        point = _make_ready(folder, point)
        document = config.model_dump_json(indent=2)
        (folder.path / "config.json").write_text(document, encoding="utf-8")
    point = context.broadcast(point)
    context.log_to(config.run_path / "logs", append=point is not None)
    if point is not None:
        _say(context, point)
    return Opened(folder, point)


def _make_ready(folder: RunFolder, point: ResumePoint | None) -> ResumePoint | None:
    """Keep what goes on; set aside what an earlier run left."""
    own = (folder.path / "checkpoints").resolve()
    is_own = point is not None and point.folder.resolve().parent == own
    if point is not None and is_own and not _newer(own, point):
        folder.forget_after(point.manifest.step)
        return point
    aside = folder.set_aside()
    if point is not None and is_own and aside is not None:
        return replace(point, folder=aside / "checkpoints" / point.folder.name)
    return point


def _newer(own: Path, point: ResumePoint) -> bool:
    """Whether the run went on after this checkpoint, which is then the start of another branch."""
    found = list_checkpoints(own, checksums=False)
    return any(not c.wrong and c.step > point.manifest.step for c in found)


def _say(context: RunContext, point: ResumePoint) -> None:
    manifest = point.manifest
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
    restarts = process_environment().get("SLURM_RESTART_COUNT")
    again = f" (Slurm restart {restarts})" if restarts else ""
    context.log.main(
        f"Resuming from {point.folder}: step {manifest.step}, epoch {manifest.epoch}, written "
        f"{when} at world size {manifest.world}; now {context.world}{again}"
    )
