"""The end of a step, where all ranks act together: agree, check, save, stop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from samestep.data.batch import Position, Source, StepData
from samestep.distributed.health.activity import READING
from samestep.distributed.signals import NO_ACTION, TIME_LIMIT, AgreedAction, StopSignals
from samestep.environment.variables import process_environment
from samestep.errors import Stopped
from samestep.reduce.stats import NO_FLAGS, LocalStats, RankFlags, ReadFlags
from samestep.run.emergency_save import EmergencySaver
from samestep.run.origin import resume_line
from samestep.run.rank_check import refuse_different_ranks
from samestep.run.requeue import requeue
from samestep.run.run_log import RunLog
from samestep.run.saver import Saver
from samestep.run_setup import RunSetup
from samestep.step.lane_passes import LanePasses
from samestep.tracking.listeners import RunListener

_STEPS_BEHIND = 2
"""How far behind the flags are read where reading them at once would wait for a GPU."""


class StepEnd:
    """Decides at the end of each step what happens next; the same on every rank."""

    def __init__(
        self, setup: RunSetup, saver: Saver, log: RunLog, listeners: RunListener, survivors: EmergencySaver
    ) -> None:
        self._config, self._context = setup.config, setup.context
        self._survivors = survivors
        self._saver, self._log, self._listeners = saver, log, listeners
        self.signals = StopSignals()
        self._began = time.monotonic()
        self.stop_reason: str | None = None
        """Lets this step be the run's last one."""
        self.done: int | None = None
        """Completed steps of the run; None before the first of this start."""
        self.ended: str | None = None
        """Why the run has ended with the last of them; None if it has not."""
        self.pause_after: int | None = None
        """Stop after so many steps as if a signal had come."""
        self._last: tuple[LanePasses, Source, Mapping[str, Any]] | None = None
        """The last step that has ended."""
        self._unread: deque[ReadFlags] = deque()
        self.watched: tuple[Sequence[nn.Module], Sequence[Optimizer]] = ((), ())
        """Modules and optimizers that must be the same on all ranks."""

    def flags(self) -> RankFlags:
        """Return what this rank sends to all others with the coming step."""
        flag = self.signals.flag(self._saver.wants_time(), self._time_is_up())
        if self._context.world == 1:
            return RankFlags(flag) if flag else NO_FLAGS
        return RankFlags(flag, self._log.times.since_last_flags())

    def _time_is_up(self) -> bool:
        """Return whether the run stops for its time limit. Rank 0 decides: its flag reaches all ranks."""
        minutes = self._config.preemption.after_minutes
        if minutes is None or not self._context.is_main:
            return False
        return time.monotonic() - self._began >= 60 * minutes

    def is_complete(self, position: Position, total: int | None) -> bool:
        """Return whether a resumed run has nothing left to do."""
        if total is not None and position.step >= total:
            return True
        epochs = self._config.epochs
        if epochs is not None and position.epoch >= epochs:
            return True
        early = self._saver.ended not in (None, "done")
        return early and "early_stopping" not in self._config.resume.allow

    def report_complete(self) -> None:
        """Log that there is nothing left to do."""
        ended, done = self._saver.ended, self._saver.position.step
        why = "" if ended in (None, "done") else f", stopped by {ended}"
        self._context.log.main(
            f"The run is complete: {done} steps{why}. Nothing to train. To train it again: resume=never. To keep it "
            'and train another: name=NAME. For python SCRIPT: SAMESTEP_ARGS="resume=never"'
        )

    def why_last(self, data: StepData, total: int | None) -> str | None:
        """Return why this step is the run's last one; None if it is not."""
        epochs = self._config.epochs
        ends = data.ends_epoch and epochs is not None and data.epoch + 1 >= epochs
        return "done" if ends or data.index + 1 == total else self.stop_reason

    def end(self, passes: LanePasses, source: Source, plan: Mapping[str, Any], total: int | None) -> bool:
        """Do what is due after a step; whether it was the run's last one."""
        data, done = passes.data, passes.data.index + 1
        self._last = passes, source, plan
        ended = self.why_last(data, total)
        self.done = done
        if self._context.world > 1:
            self._survivors.reached(data.following, plan, ended)
        action = self._agree(passes.stats)
        every = self._config.check_ranks_every
        if every is not None and done % every == 0:
            skip_buffers = self._config.same == "samples"
            has_owners = self._config.distributed.shard != "none"
            refuse_different_ranks(self._context, data.index, *self.watched, skip_buffers, has_owners)
        stops = ended is not None or action.signal is not None or done == self.pause_after
        if stops or action.save or self._saver.is_due(done, data.epoch + 1, data.ends_epoch):
            self._log.flush()  # a step that was not finite ends the run here, and is not saved
            passes.refuse_bad_weights()
            if self._saver.save(self._position_after(data, source), plan, ended):
                self._listeners.on_save(done, self._saver.metrics)
        if stops and ended is None:
            self._stop(action, done)
        if ended is not None:
            self._log.complete = True
            self.ended = ended
        return ended is not None

    def leave(self, reason: str) -> None:
        """Save a run that its loop has left at the top of a step: the step before it was the last one."""
        if self._last is None:
            return
        passes, source, plan = self._last
        self._log.flush()
        passes.refuse_bad_weights()
        self._saver.save(self._position_after(passes.data, source), plan, reason)
        self._saver.wait()
        self._log.complete = True
        self.ended = reason

    def _position_after(self, data: StepData, source: Source) -> Position:
        """Return the position after a step, with the states of all ranks' streams."""
        after = data.following
        if not source.has_streams:
            return after
        by_rank = self._context.gather(dict(after.streams))
        return replace(after, streams={lane: s for rank in by_rank for lane, s in rank.items()})

    def _agree(self, stats: LocalStats) -> AgreedAction:
        """Return what the ranks request: now, or a fixed number of steps late for the GPU's sake."""
        if stats.no_requests and not self._unread:
            return NO_ACTION
        self._unread.append(stats.flags())
        if len(self._unread) <= (_STEPS_BEHIND if stats.flags_wait else 0):
            return NO_ACTION
        activity = self._context.activity
        before = activity.enter(READING)  # where this waits, it waits for the device
        flags = self._unread.popleft()()
        activity.enter(before)
        if len(flags) > 1:
            self._log.times.add_busy(flags)
        return AgreedAction.of([rank.flag for rank in flags])

    def _stop(self, action: AgreedAction, done: int) -> None:
        self._saver.wait()
        why = "--stop-after"
        if action.signal is not None:
            by_rank = self._context.world > 1 and action.signal != TIME_LIMIT
            why = action.signal + (f" on rank {action.rank}" if by_rank else "")
        line = resume_line(self._config)
        how = "when it is started again" if line is None else f"with: {line}"
        kept = f"it is saved, and resumes from there {how}"
        if not self._config.checkpoint.enabled:
            kept = "nothing is saved, since checkpoint.enabled is false"
        message = f"{why} stopped the run after step {done}: {kept}"
        self._context.log.main(message)
        if self._context.is_main and action.signal is not None:
            report = self._context.log.main
            requeue(self._config.preemption, action.signal, process_environment(), report)
        # A launcher ends all ranks when the first one exits: none may before rank 0 has saved.
        self._context.barrier()
        raise Stopped(message)
