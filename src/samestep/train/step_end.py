"""The end of a step, where all ranks act together: agree, check, save, stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from samestep.config import Config
from samestep.data.batch import Position, Source
from samestep.distributed.context import RunContext
from samestep.distributed.health.activity import READING
from samestep.distributed.signals import NO_ACTION, AgreedAction, StopSignals
from samestep.environment.variables import process_environment
from samestep.errors import Stopped
from samestep.reduce.stats import NOTHING_TO_TELL, LocalStats, RankFlags, ReadNotes
from samestep.step.step import Step
from samestep.train.rank_check import refuse_different_ranks
from samestep.train.requeue import requeue
from samestep.train.saver import Saver
from samestep.train.step_times import StepTimes

_STEPS_BEHIND = 2
"""How far behind the notes are read where reading them at once would wait for a GPU."""


class StepEnd:
    """Decides at the end of each step what happens next; the same on every rank."""

    def __init__(self, saver: Saver, times: StepTimes, context: RunContext, config: Config) -> None:
        self._saver, self._times, self._context, self._config = saver, times, context, config
        self.signals = StopSignals()
        self.stop_reason: str | None = None
        """Why the run is to be over with this step."""
        self.pause_after: int | None = None
        """The step after which to stop as if a signal had come."""
        self._unread: deque[ReadNotes] = deque()
        self._watched: tuple[Sequence[nn.Module], Sequence[Optimizer]] = ((), ())

    def watch(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """What must be the same on all ranks."""
        self._watched = (modules, optimizers)

    def note(self) -> RankFlags:
        """What this rank tells all others with the coming step."""
        flag = self.signals.flag(self._saver.wants_time())
        if self._context.world == 1:
            return RankFlags(flag) if flag else NOTHING_TO_TELL
        return RankFlags(flag, self._times.since_last_note())

    def is_over(self, position: Position, total: int | None) -> bool:
        """Whether a run that goes on has nothing left to do."""
        if total is not None and position.step >= total:
            return True
        epochs = self._config.epochs
        if epochs is not None and position.epoch >= epochs:
            return True
        early = self._saver.ended not in (None, "done")
        return early and "early_stopping" not in self._config.resume.allow

    def why_over(self, step: Step, total: int | None) -> str | None:
        """Why the run is over with this step; None if it goes on."""
        epochs = self._config.epochs
        ends = step.ends_epoch and epochs is not None and step.epoch + 1 >= epochs
        return "done" if ends or step.index + 1 == total else self.stop_reason

    def end(
        self,
        step: Step,
        source: Source,
        plan: Mapping[str, Any],
        total: int | None,
        flush: Callable[[], None],
    ) -> bool:
        """Do what is due after a step; whether the run is over."""
        action = self._agree(step.stats)
        every = self._config.check_ranks_every
        if every is not None and (step.index + 1) % every == 0:
            refuse_different_ranks(
                self._context, step.index, *self._watched, self._config.same == "samples"
            )
        done, ended = step.index + 1, self.why_over(step, total)
        stops = ended is not None or action.signal is not None or done == self.pause_after
        if stops or action.save or self._saver.is_due(done, step.epoch + 1, step.ends_epoch):
            flush()  # a step that was not finite ends the run here, and is not saved
            step.refuse_bad_weights()
            after = step.following
            if source.has_streams:
                told = self._context.gather(dict(after.streams))
                streams = {lane: state for rank in told for lane, state in rank.items()}
                after = replace(after, streams=streams)
            self._saver.save(after, plan, ended)
        if stops and ended is None:
            self._stop(action, done)
        return ended is not None

    def _agree(self, stats: LocalStats) -> AgreedAction:
        """What the ranks want: now, or a fixed number of steps late for the GPU's sake."""
        if stats.nobody_wants and not self._unread:
            return NO_ACTION
        self._unread.append(stats.notes())
        if len(self._unread) <= (_STEPS_BEHIND if stats.notes_wait else 0):
            return NO_ACTION
        activity = self._context.activity
        before = activity.enter(READING)  # where this waits, it waits for the device
        notes = self._unread.popleft()()
        activity.enter(before)
        if len(notes) > 1:
            self._times.hear(notes)
        return AgreedAction.of([note.flag for note in notes])

    def _stop(self, action: AgreedAction, done: int) -> None:
        self._saver.wait()
        why = "--stop-after"
        if action.signal is not None:
            why = action.signal + (f" on rank {action.rank}" if self._context.world > 1 else "")
        kept = "it is saved, and goes on from there when it is started again"
        if not self._config.checkpoint.enabled:
            kept = "nothing is saved, as checkpoint.enabled: false says"
        message = f"{why} stopped the run after step {done}: {kept}"
        self._context.log.main(message)
        if self._context.is_main and action.signal is not None:
            report = self._context.log.main
            requeue(self._config.preemption, action.signal, process_environment(), report)
        # A launcher ends all ranks when the first one exits: nobody may before rank 0 has saved.
        self._context.barrier()
        raise Stopped(message)
