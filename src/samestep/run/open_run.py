"""Opens a run: its directory locked, and where it resumes, decided once for all ranks."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import write_whole
from samestep.checkpoint.manifest import PARTIAL, Manifest, folder_name
from samestep.checkpoint.ownership import claim, reraise_os_errors
from samestep.checkpoint.resume import ResumePoint, find_resume_point, refuse_another_run
from samestep.config import Config
from samestep.config.trackers import may_hold_secret
from samestep.distributed.context import RunContext
from samestep.environment.variables import is_same_launch, launch_names, process_environment
from samestep.lanes.plan import BatchPlan
from samestep.run.origin import ORIGIN, Origin
from samestep.run.run_dir import CONFIG, RunDir
from samestep.run_setup import RunSetup


class Opened:
    """The parts that a run starts with.

    What it changes in the directory of an earlier run is undone if the run is refused before its
    first step.
    """

    def __init__(self, setup: RunSetup) -> None:
        self._config, self._context = setup.config, setup.context
        self.run_dir: RunDir | None = None
        """On rank 0, which holds its lock."""
        self.point: ResumePoint | None = None
        """Where it resumes; None from the beginning."""
        self._origin: Origin | None = None
        self._accepted = False
        self._aside: Path | None = None
        self._adopted: dict[Path, Path] = {}
        """Copies of another run's checkpoints, and the names that they get once it is accepted."""

    def prepare(self, batch: BatchPlan) -> None:
        """Lock the directory and make it ready, on rank 0."""
        config, environ = self._config, process_environment()
        self.run_dir = run_dir = RunDir(config.run_path)
        # Now, and not when it is recorded: by then the file may have been edited.
        self._origin = Origin.of(config)
        with reraise_os_errors(run_dir.path):
            began_here = is_same_launch(environ, run_dir.started_by())
            warn = self._context.log.warn
            point = find_resume_point(config, run_dir.path, began_here, warn, run_dir.branched_from())
            if point is not None:
                planned = {"global_batch": batch.global_batch, "lanes": batch.lane_count}
                refuse_another_run(config, planned, point)
            self.point = self._make_ready(run_dir, point, launch_names(environ))

    def accept(self) -> None:
        """The run is not refused: its directory is now that of this run. Every rank calls this."""
        if self._accepted:
            return
        self._accepted = True
        if self.point is not None and self.point.branches:
            self._context.barrier()  # others may still be reading the copy under its first name
        if self.run_dir is None:
            return
        with reraise_os_errors(self.run_dir.path):
            for copy, name in self._adopted.items():
                copy.rename(name)
            document = _with_whole_path(self._config).model_dump_json(indent=2)
            private = may_hold_secret(self._config.model_dump(mode="json"))
            if private:  # the checkpoints have the config, too
                self.run_dir.path.chmod(0o700)
            if self._origin is not None:
                write_whole(self.run_dir.path / ORIGIN, self._origin.text(document), private)
            write_whole(self.run_dir.path / CONFIG, document, private)

    @property
    def owns_directory(self) -> bool:
        """Return whether this process may write there how the run ended: not of one that is refused."""
        fresh = self.point is None and self._aside is None
        return self.run_dir is not None and (self._accepted or fresh)

    def close(self) -> None:
        """Let others use the directory, as it was before if nothing came of the run. Safe to call twice."""
        if self.run_dir is None:
            return
        run_dir, self.run_dir = self.run_dir, None
        try:
            if not self._accepted:
                self._undo(run_dir)
        finally:
            run_dir.close()

    def _undo(self, run_dir: RunDir) -> None:
        for copy in self._adopted:
            shutil.rmtree(copy, ignore_errors=True)
        own = run_dir.path / "checkpoints"
        if self._adopted and own.is_dir() and not any(own.iterdir()):
            own.rmdir()
        if self._aside is not None:
            run_dir.bring_back(self._aside)

    def _make_ready(self, run_dir: RunDir, point: ResumePoint | None, launch: Sequence[str]) -> ResumePoint | None:
        """Keep what is resumed; set aside what an earlier run left."""
        if point is not None and not point.branches:
            run_dir.forget_after(point.manifest.step)
            return point
        own = run_dir.path / "checkpoints"
        is_own = point is not None and point.folder.resolve().parent == own.resolve()
        self._aside = run_dir.set_aside()
        run_dir.begin(launch)
        if point is None:
            return None
        folder = point.folder
        if is_own and self._aside is not None:
            folder = self._aside / "checkpoints" / point.folder.name
        copy = self._adopt(point.manifest, folder, own)
        return replace(point, folder=copy, origin=point.folder)

    def _adopt(self, manifest: Manifest, folder: Path, own: Path) -> Path:
        """Bring the checkpoint that a branch starts from, and the best one, into its directory.

        So it can resume from there before it has saved anything itself. Checkpoints do not change:
        their files may have two names.
        """
        start = folder_name(manifest.step)
        sources = {start: folder}
        if manifest.best is not None:
            best = folder_name(manifest.best.step)
            sources.setdefault(best, folder.parent / best)
        for name, source in sources.items():
            if source.is_dir():
                copy = own / (name + PARTIAL)
                shutil.rmtree(copy, ignore_errors=True)
                self._adopted[copy] = own / name
                shutil.copytree(source, copy, copy_function=_second_name)
        return own / (start + PARTIAL)


def open_run(setup: RunSetup) -> Opened:
    """Lock the run's directory and make it ready; every rank gets the same resume point."""
    config, context = setup.config, setup.context
    opened = Opened(setup)
    try:
        if context.is_main:
            opened.prepare(setup.batch)
        opened.point = point = context.broadcast(opened.point)
        with reraise_os_errors(config.run_path):
            # On a machine that does not share the directory, this makes it.
            context.log_to(claim(config.run_path, "logs"), append=point is not None)
    except BaseException:
        opened.close()
        raise
    if point is not None:
        _log_resume(context, point)
        _keep_threads(config, context, point)
    return opened


def _with_whole_path(config: Config) -> Config:
    """Return the config, its task and trackers named so that they are found from the run's directory too."""
    folder, trackers = config.folder.resolve(), config.trackers
    whole = [
        entry.model_copy(update={"name": str(folder / entry.name)}) if entry.is_file else entry
        for entry in trackers.classes
    ]
    update: dict[str, Any] = {"trackers": trackers.model_copy(update={"classes": tuple(whole)})}
    if config.task is not None:
        update["task"] = str(folder / config.task)
    if config.fold is not None:
        whole_file = str(folder / config.fold.file)
        update["fold"] = config.fold.model_copy(update={"file": whole_file})
    return config.model_copy(update=update)


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
    context.log.main(f"{saved} threads per rank, as before: another number would change its last bits")


def _log_resume(context: RunContext, point: ResumePoint) -> None:
    manifest = point.manifest
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
    restarts = process_environment().get("SLURM_RESTART_COUNT")
    again = f" (Slurm restart {restarts})" if restarts else ""
    context.log.main(
        f"Resuming from {point.shown}: step {manifest.step}, epoch {manifest.epoch}, written "
        f"{when} at world size {manifest.world}; now {context.world}{again}"
    )
