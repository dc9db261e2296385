"""A run's measurements: read from the device in bulk, written by rank 0, passed to listeners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samestep.errors import NonFiniteLoss, TaskError
from samestep.optim.nonfinite import FiniteGuard
from samestep.optim.update import Update
from samestep.run_setup import RunSetup
from samestep.step.step_log import StepLog, StepRecord
from samestep.tracking.listeners import RunListener
from samestep.tracking.step_times import StepTimes
from samestep.tracking.trackers import RecentRows, Trackers


class RunLog:
    """Collects what steps measure and hands it to the trackers and the run's listeners."""

    def __init__(self, setup: RunSetup, trackers: Trackers, listeners: RunListener) -> None:
        config, context = setup.config, setup.context
        context.activity.timed_every = min(context.activity.timed_every, config.log_every)
        trackers.warn_with(context.log.warn)
        self._log_files = trackers.log_files
        self.complete = False
        """Whether the run's last step is through: then trackers get its files when this is closed."""
        self.recent = RecentRows()
        """What rank 0 may not have written to the disk yet."""
        # Only where survivors can use it: on a GPU, other ranks than 0 would wait for their device.
        if context.world > 1 and context.device.type == "cpu":
            trackers = Trackers([trackers, self.recent])
        self._setup, self._trackers, self._listeners = setup, trackers, listeners
        self.times = StepTimes(context.activity, context.device)
        self.steps = StepLog(config.log_every, self._write, context.activity)
        self._update: Update | None = None
        self._guard: FiniteGuard | None = None
        self._alone = False

    def follow(self, update: Update, guard: FiniteGuard) -> None:
        """Before the first step: whose updates are measured, and what stops at a bad loss."""
        self._update, self._guard = update, guard

    def _write(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            if record.bad_lanes and self._guard is not None and not record.skipped:
                if self._alone:
                    raise NonFiniteLoss(f"the loss of step {record.step} is NaN or infinite")
                self._guard.stop(record.step, record.bad_lanes)
            self._trackers.write(record.values())
            self._listeners.on_record(record)
        last = records[-1]
        row = self.times.row(len(records), last.seconds, self._setup.batch.global_batch)
        self._trackers.write({"step": last.step, **row})
        self._listeners.on_times(last.step, row)
        self._trackers.flush()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write values to the trackers, once for the run."""
        if "step" in values:
            raise TaskError("a value is called step, as the row's own number: rename it")
        self._trackers.write({"step": step, **values})

    def sync_update(self) -> None:
        """Wait until it is known whether the last update counted."""
        if self._update is not None:
            self._update.sync_update()

    def flush(self) -> None:
        """Read every loss that is still on the device, and write it."""
        self.sync_update()
        self.steps.flush()
        self._trackers.flush()

    def flush_alone(self) -> None:
        """Read and write every loss without other ranks, which may be gone."""
        self._alone = True  # to name the samples of a bad loss, their rank would be asked
        self.flush()

    def close(self) -> None:
        if self.complete:
            config = self._setup.config
            self._log_files(config.run_path, config.trackers.artifacts)
        self._trackers.close()
