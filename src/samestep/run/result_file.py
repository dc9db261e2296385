"""Writes a run's `result.json`: when it begins, and at every kind of end that a process can notice."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from samestep.checkpoint.listing import list_checkpoints
from samestep.checkpoint.ownership import reraise_os_errors
from samestep.checkpoint.run_result import RunResult, Status, read_result, write_result
from samestep.errors import CheckpointError, PeerLost, Stopped
from samestep.parsing.limits import short
from samestep.run.open_run import Opened
from samestep.run.saver import Saver
from samestep.run.step_end import StepEnd
from samestep.run_setup import RunSetup
from samestep.step.step_log import StepRecord
from samestep.tracking.listeners import RunListener

_LONGEST_REASON = 2_000


class ResultFile(RunListener):
    """Follows a run, and writes its result on rank 0."""

    draws = False

    def __init__(self, setup: RunSetup, opened: Opened, saver: Saver, step_end: StepEnd) -> None:
        self._context, self._folder = setup.context, setup.config.run_path
        self._opened, self._saver, self._step_end = opened, saver, step_end
        self._before = self._read_before()
        self._began: float | None = None
        self._loss: float | None = None

    def _read_before(self) -> RunResult | None:
        """Return what the run that is resumed here had come to."""
        point = self._opened.point
        if self._opened.run_dir is None or point is None or point.branches:
            return None
        try:
            return read_result(self._folder)
        except CheckpointError as error:
            self._context.log.warn(f"{error}. It is written anew")
            return None

    def begin(self) -> None:
        """Before the first step of this start: whoever reads the file knows that it is not done."""
        self._began = time.monotonic()
        if self._opened.owns_directory:
            self._write(self._result("running", None))

    def on_record(self, record: StepRecord) -> None:
        self._loss = record.loss

    def end(self, error: BaseException | None) -> None:
        """The run has ended, and everything that it saves is saved."""
        if not self._opened.owns_directory:
            return  # the files there are those of an earlier run
        if error is None and self._began is None and self._before is not None:
            return  # it was complete already, and its result is there
        result = self._result(*self._status(error))
        if error is None:
            self._write(result)
            return
        try:
            self._write(result)
        except Exception as late:  # of the same full disk, most often: the first error is the run's
            self._context.log.warn(f"result.json could not be written: {late}")

    def _status(self, error: BaseException | None) -> tuple[Status, str | None]:
        if isinstance(error, Stopped):
            return "preempted", short(str(error), _LONGEST_REASON)
        if error is not None:
            text = f"{type(error).__name__}: {error}"
            # What follows is the other rank's traceback, which its own log has.
            text = text.splitlines()[0] if isinstance(error, PeerLost) else text
            return "failed", short(text, _LONGEST_REASON)
        ended = self._step_end.ended if self._began is not None else self._saver.ended
        if ended is None:
            return "unfinished", "the loop left its steps before the last one"
        return ("finished", None) if ended == "done" else ("stopped_early", ended)

    def _write(self, result: RunResult) -> None:
        with reraise_os_errors(self._folder):
            write_result(self._folder, result)

    def _result(self, status: Status, reason: str | None) -> RunResult:
        before = self._before
        seconds = 0.0 if before is None else before.seconds
        if self._began is not None:
            seconds += time.monotonic() - self._began
        loss = self._loss
        if loss is None and before is not None:
            loss = before.loss
        best, checkpoints = self._kept()
        done = self._step_end.done
        steps = self._saver.position.step if done is None else done
        return RunResult(
            status, reason, steps, round(seconds, 3), self._context.world, loss,
            dict(self._saver.metrics), best, checkpoints,
        )  # fmt: skip

    def _kept(self) -> tuple[Mapping[str, Any] | None, dict[str, str]]:
        """Return the best evaluation, and where the last and the best checkpoints are."""
        found = list_checkpoints(self._saver.folder, checksums=False)
        usable = {item.step: item for item in found if not item.wrong}
        paths: dict[str, str] = {}
        if usable:
            paths["last"] = str(usable[max(usable)].folder.relative_to(self._folder))
        best = self._saver.best
        if best is None:
            return None, paths
        metrics: Mapping[str, Any] = {best.metric: best.value}
        kept = usable.get(best.step)
        if kept is not None and kept.manifest is not None:
            paths["best"] = str(kept.folder.relative_to(self._folder))
            if kept.manifest.measured == best.step:
                metrics = kept.manifest.metrics
        value = {"step": best.step, "metric": best.metric, "value": best.value}
        return {**value, "metrics": dict(metrics)}, paths
