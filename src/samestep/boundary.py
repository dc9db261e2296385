"""The end of a step, where all ranks act together: agree, check, save, stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from samestep.config import Config
from samestep.consistency import refuse_different_ranks
from samestep.data import Position, Source
from samestep.errors import Stopped
from samestep.requeue import requeue
from samestep.runtime.context import RunContext
from samestep.runtime.environment import process_environment
from samestep.runtime.lanestats import NOTHING_TO_TELL, LocalStats, RankNote, ReadNotes
from samestep.runtime.pulse import READING
from samestep.runtime.signals import NO_WISH, StopSignals, Wish
from samestep.saving import Saver
from samestep.step import Step
from samestep.timing import StepTimes

_STEPS_BEHIND = 2
"""How far behind the notes are read where reading them at once would wait for a GPU."""


class Boundary:
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

    def note(self) -> RankNote:
        """What this rank tells all others with the coming step."""
        flag = self.signals.flag(self._saver.wants_time())
        if self._context.world == 1:
            return RankNote(flag) if flag else NOTHING_TO_TELL
        return RankNote(flag, self._times.since_last_note())

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
        wish = self._agree(step.stats)
        every = self._config.check_ranks_every
        if every is not None and (step.index + 1) % every == 0:
            refuse_different_ranks(
                self._context, step.index, *self._watched, self._config.same == "samples"
            )
        done, ended = step.index + 1, self.why_over(step, total)
        stops = ended is not None or wish.signal is not None or done == self.pause_after
        if stops or wish.save or self._saver.is_due(done, step.epoch + 1, step.ends_epoch):
            flush()  # a step that was not finite ends the run here, and is not saved
            step.refuse_bad_weights()
            after = step.following
            if source.has_streams:
                told = self._context.gather(dict(after.streams))
                streams = {lane: state for rank in told for lane, state in rank.items()}
                after = replace(after, streams=streams)
            self._saver.save(after, plan, ended)
        if stops and ended is None:
            self._stop(wish, done)
        return ended is not None

    def _agree(self, stats: LocalStats) -> Wish:
        """What the ranks want: now, or a fixed number of steps late for the GPU's sake."""
        if stats.nobody_wants and not self._unread:
            return NO_WISH
        self._unread.append(stats.notes())
        if len(self._unread) <= (_STEPS_BEHIND if stats.notes_wait else 0):
            return NO_WISH
        pulse = self._context.pulse
        before = pulse.enter(READING)  # where this waits, it waits for the device
        notes = self._unread.popleft()()
        pulse.enter(before)
        if len(notes) > 1:
            self._times.hear(notes)
        return Wish.of(notes)

    def _stop(self, wish: Wish, done: int) -> None:
        self._saver.wait()
        why = "--stop-after"
        if wish.signal is not None:
            why = wish.signal + (f" on rank {wish.rank}" if self._context.world > 1 else "")
        kept = "it is saved, and goes on from there when it is started again"
        if not self._config.checkpoint.enabled:
            kept = "nothing is saved, as checkpoint.enabled: false says"
        message = f"{why} stopped the run after step {done}: {kept}"
        self._context.log.main(message)
        if self._context.is_main and wish.signal is not None:
            said = requeue(self._config.preemption, wish.signal, process_environment())
            if said:
                self._context.log.main(said)
        # A launcher ends all ranks when the first one exits: nobody may before rank 0 has saved.
        self._context.barrier()
        raise Stopped(message)
