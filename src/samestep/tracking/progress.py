"""Progress of long work: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from samestep.distributed.logging import RankLog
from samestep.environment.variables import process_environment, report_pipe
from samestep.step.step import Step
from samestep.step.step_log import StepRecord
from samestep.tracking.listeners import RunListener

if TYPE_CHECKING:
    from typing_extensions import Self

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_MOVES = 0.1
"""Least time between moves of a bar: an eye follows no more, and short steps must not wait for a terminal."""
_WORTH_SHOWING = 1.2
"""Ratio of the slowest rank's work to the fastest one's from which on it is named."""


class _Pace:
    """Estimates how long the rest takes, at the pace of all steps since the first.

    A mean over all: a moving one would change with every evaluation and save. What comes before the
    first is left out, since it may hold a capture or a compilation.
    """

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def left(self, done: int, total: int | None) -> str:
        """Empty where it is not known."""
        if self._first is None:
            self._first = done, time.monotonic()
        before, began = self._first
        if total is None or done <= before:
            return ""
        each = (time.monotonic() - began) / (done - before)
        seconds = round(max(0, total - done) * each)
        shown = f"{seconds} s" if seconds < 100 else str(timedelta(seconds=seconds))
        return f"  {shown} left"


class _Shown:
    """So far, of how much; nothing at all on ranks other than 0.

    A bar only for a process alone on its terminal: what other ranks print would tear it.
    """

    def __init__(self, unit: str, total: int | None, log: RankLog, shown: bool) -> None:
        self._unit, self._total, self._log, self._shown = unit, total, log, shown
        self._last = time.monotonic()
        self._pace = _Pace()
        self._state = (0, "")
        self._bar: Progress | None = None
        if shown and _has_terminal(log):
            self._bar = Progress(
                TextColumn(unit),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                console=Console(stderr=True),
            )
            self._row = self._bar.add_task("", total=total, text="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._bar is not None:
            done, text = self._state
            self._bar.update(self._row, completed=done, text=text)
            self._bar.stop()

    def _show(self, done: int, text: str) -> None:
        """Keep how far it is, and show it where that is due."""
        if not self._shown:
            return
        left = self._pace.left(done, self._total)
        self._state = (done, text)
        pause = _SECONDS_BETWEEN_LINES if self._bar is None else _SECONDS_BETWEEN_MOVES
        if time.monotonic() - self._last <= pause:
            return
        self._last = time.monotonic()
        text += left
        if self._bar is not None:
            self._bar.update(self._row, completed=done, text=text)
        else:
            of = "" if self._total is None else f"/{self._total}"
            self._log.main(f"{self._unit} {done}{of}  {text}")


def _has_terminal(log: RankLog) -> bool:
    """Return whether this process has a terminal to itself: other ranks of `samestep launch` write to files."""
    alone = not log.among_others or report_pipe(process_environment()) is not None
    return alone and sys.stderr.isatty()


class TrainingProgress(_Shown, RunListener):
    """Loss, throughput and time left."""

    draws = False

    def __init__(self, total: int | None, samples_per_step: int, log: RankLog, shown: bool) -> None:
        super().__init__("step", total, log, shown)
        self._samples_per_step = samples_per_step

        self._measured, self._spread = "", ""

    def on_step(self, step: Step) -> None:
        self._show(step.index + 1, self._measured + self._spread)

    def on_record(self, record: StepRecord) -> None:
        if self._shown:
            rate = self._samples_per_step / record.seconds if record.seconds else 0.0
            self._measured = f"loss {record.loss:.4f}  {rate:,.0f} samples/s"

    def on_times(self, step: int, times: Mapping[str, Any]) -> None:
        spread = times.get("rank_spread", 1.0)
        differs = f"  rank {times.get('slowest_rank')} {spread:.1f}x the fastest rank's work"
        self._spread = differs if spread >= _WORTH_SHOWING else ""


class CountedProgress(_Shown):
    """Samples, turns of a comparison, or whatever else is counted."""

    def __init__(self, unit: str, total: int, log: RankLog, shown: bool) -> None:
        super().__init__(unit, total, log, shown)
        self._done, self._text = 0, ""

    def begin(self, text: str) -> None:
        """Show what comes next."""
        self._text = text
        self._show(self._done, text)

    def add(self, count: int = 1) -> None:
        """Show that so many more are over."""
        self._done += count
        self._show(self._done, self._text)
