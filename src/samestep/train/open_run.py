"""Opens a run: its directory locked, and where it resumes, decided once for all ranks."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.checkpoint.format import PARTIAL, folder_name
from samestep.checkpoint.resume import ResumePoint, find_resume_point, refuse_another_run
from samestep.config import Config
from samestep.distributed.context import RunContext
from samestep.environment.variables import is_same_launch, launch_names, process_environment
from samestep.lanes.plan import BatchPlan
from samestep.run_setup import RunSetup
from samestep.train.run_dir import RunDir


@dataclass(frozen=True)
class Opened:
    """What a run starts with."""

    run_dir: RunDir | None
    """On rank 0, which holds its lock."""
    point: ResumePoint | None
    """Where it resumes; None from the beginning."""

    def close(self) -> None:
        """Let others use the directory. Safe to call twice."""
        if self.run_dir is not None:
            self.run_dir.close()


def open_run(setup: RunSetup) -> Opened:
    """Lock the run's directory and make it ready; every rank gets the same resume point."""
    config, context = setup.config, setup.context
    run_dir, point = None, None
    if context.is_main:
        run_dir = RunDir(config.run_path)
        try:
            point = _prepare_run_dir(config, context, setup.batch, run_dir)
        except BaseException:
            run_dir.close()
            raise
    point = context.broadcast(point)
    context.log_to(config.run_path / "logs", append=point is not None)
    if point is not None:
        _log_resume(context, point)
        _keep_threads(config, context, point)
    return Opened(run_dir, point)


def _prepare_run_dir(
    config: Config, context: RunContext, batch: BatchPlan, run_dir: RunDir
) -> ResumePoint | None:
    environ = process_environment()
    began_here = is_same_launch(environ, run_dir.started_by())
    point = find_resume_point(config, run_dir.path, began_here, context.log.warn)
    if point is not None:
        planned = {"global_batch": batch.global_batch, "lanes": batch.lane_count}
        refuse_another_run(config, planned, point)
    point = _make_ready(run_dir, point, launch_names(environ))
    document = _with_whole_path(config).model_dump_json(indent=2)
    (run_dir.path / "config.json").write_text(document, encoding="utf-8")
    return point


def _with_whole_path(config: Config) -> Config:
    """The config, its task named so that it is found from the run's directory too."""
    if config.task is None:
        return config
    return config.model_copy(update={"task": str(config.folder.resolve() / config.task)})


def _make_ready(
    run_dir: RunDir, point: ResumePoint | None, launch: Sequence[str]
) -> ResumePoint | None:
    """Keep what is resumed; set aside what an earlier run left."""
    if point is not None and not point.branches:
        run_dir.forget_after(point.manifest.step)
        return point
    own = run_dir.path / "checkpoints"
    is_own = point is not None and point.folder.resolve().parent == own.resolve()
    aside = run_dir.set_aside()
    run_dir.begin(launch)
    if point is None:
        return None
    if is_own and aside is not None:
        point = replace(point, folder=aside / "checkpoints" / point.folder.name)
    return replace(point, folder=_adopt(point, own))


def _adopt(point: ResumePoint, own: Path) -> Path:
    """Bring the checkpoint that a branch starts from, and the best one, into its directory.

    So it can resume from there before it has saved anything itself. Checkpoints do not change:
    their files may have two names.
    """
    start = folder_name(point.manifest.step)
    sources = {start: point.folder}
    if point.manifest.best is not None:
        best = folder_name(point.manifest.best.step)
        sources.setdefault(best, point.folder.parent / best)
    for name, source in sources.items():
        if source.is_dir() and not (own / name).exists():
            partial = own / (name + PARTIAL)
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(source, partial, copy_function=_second_name)
            partial.rename(own / name)
    return own / start


def _second_name(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _keep_threads(config: Config, context: RunContext, point: ResumePoint) -> None:
    """Compute with the run's threads, where nothing but `same: bits` has decided them anew."""
    saved = point.manifest.plan.get("threads_per_rank")
    decided_anew = config.same == "bits" and context.device.type == "cpu" and context.threads == 1
    if config.distributed.threads_per_rank != "auto" or not decided_anew or not saved or saved == 1:
        return
    context.use_threads(saved)
    context.log.main(
        f"{saved} threads per rank, as before: another number would change its last bits"
    )


def _log_resume(context: RunContext, point: ResumePoint) -> None:
    manifest = point.manifest
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
    restarts = process_environment().get("SLURM_RESTART_COUNT")
    again = f" (Slurm restart {restarts})" if restarts else ""
    context.log.main(
        f"Resuming from {point.folder}: step {manifest.step}, epoch {manifest.epoch}, written "
        f"{when} at world size {manifest.world}; now {context.world}{again}"
    )
