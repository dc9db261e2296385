"""What a run opens once it is known how large its steps are: directory, checkpoints, logs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from samestep.run_setup import RunSetup
from samestep.step.lane_passes import LanePasses
from samestep.train.listeners import Listeners
from samestep.train.open_run import open_run
from samestep.train.result_file import ResultFile
from samestep.train.run_log import RunLog
from samestep.train.saver import Saver
from samestep.train.step_end import StepEnd
from samestep.train.survivors import Survivors
from samestep.train.trackers import open_trackers


class RunParts:
    """A run's files and what acts at the end of its steps.

    All of them write or compare the config, so they are opened when it is complete.
    """

    def __init__(
        self, setup: RunSetup, listeners: Listeners, passes: Callable[[], LanePasses | None]
    ) -> None:
        """Args:
        setup: The run's setup, its global batch known.
        listeners: What follows the run.
        passes: The step that is running, if one is.
        """
        config, context = setup.config, setup.context
        with ExitStack() as opening:
            self.opened = open_run(setup)
            opening.callback(self.opened.close)
            saver = self.saver = Saver(config, context, config.run_path, self.opened.point)
            trackers = open_trackers(
                config, config.run_path, context.is_main, saver.position.step, saver.rows
            )
            opening.pop_all()
        log = self.log = RunLog(setup, trackers, listeners)
        self.survivors = Survivors(setup, saver, log, passes)
        self.step_end = StepEnd(setup, saver, log, listeners, self.survivors)
        self.result = ResultFile(setup, self.opened, saver, self.step_end)
        listeners.add(self.result)

    def close(self, cause: BaseException | None = None) -> None:
        """Write what is left, and let others use the directory.

        Args:
            cause: What ended the run, if something did.
        """
        with ExitStack() as closing:
            closing.callback(self.opened.close)
            # An error of what is closed before it is the run's, unless that has one of its own.
            closing.push(lambda kind, error, trace: self.result.end(cause or error))
            closing.callback(self.saver.close, cause)
            closing.callback(self.log.close)
