"""Progress of long work: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from samestep.distributed.logging import RankLog
from samestep.step.step_log import StepRecord
from samestep.train.listeners import RunListener

if TYPE_CHECKING:
    from typing_extensions import Self

_SECONDS_BETWEEN_LINES = 10.0


class _Shown:
    """So far, of how much; nothing at all on ranks other than 0."""

    def __init__(self, unit: str, total: int | None, log: RankLog, shown: bool) -> None:
        self._unit, self._total, self._log, self._shown = unit, total, log, shown
        self._last_line = time.monotonic()
        self._bar: Progress | None = None
        if shown and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn(unit),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._row = self._bar.add_task("", total=total, text="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _is_due(self) -> bool:
        """Whether what there is to show would be seen: a line is only now and then."""
        if not self._shown or self._bar is not None:
            return self._shown
        return time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES

    def _show(self, done: int, text: str, rest: str = "") -> None:
        """Show how far it is, if that is due; `rest` is what a bar knows by itself."""
        if self._bar is not None:
            self._bar.update(self._row, completed=done, text=text)
        elif self._is_due():
            self._last_line = time.monotonic()
            left = "" if self._total is None else f"/{self._total}"
            self._log.main(f"{self._unit} {done}{left}  {text}{rest}")


class TrainingProgress(_Shown, RunListener):
    """Loss, throughput and time left."""

    draws = False

    def __init__(self, total: int | None, samples_per_step: int, log: RankLog, shown: bool) -> None:
        super().__init__("step", total, log, shown)
        self._samples_per_step = samples_per_step

    def on_record(self, record: StepRecord) -> None:
        if not self._is_due():
            return
        rate = self._samples_per_step / record.seconds if record.seconds else 0.0
        text = f"loss {record.loss:.4f}  {rate:,.0f} samples/s"
        self._show(record.step + 1, text, self._remaining(record))

    def _remaining(self, record: StepRecord) -> str:
        if self._total is None:
            return ""
        return f"  {(self._total - record.step - 1) * record.seconds:.0f} s left"


class SampleProgress(_Shown):
    """Samples that are through, and how many a second."""

    def __init__(self, total: int, log: RankLog, shown: bool) -> None:
        super().__init__("sample", total, log, shown)
        self._began, self._done = time.monotonic(), 0

    def add(self, samples: int) -> None:
        """Show that so many more are through."""
        self._done += samples
        if self._shown:
            rate = self._done / max(time.monotonic() - self._began, 1e-9)
            self._show(self._done, f"{rate:,.0f} samples/s")


class TurnProgress(_Shown):
    """Turns of a comparison, and whose it is."""

    def __init__(self, total: int, log: RankLog, shown: bool) -> None:
        super().__init__("turn", total, log, shown)
        self._done, self._whose = 0, ""

    def begin(self, whose: str) -> None:
        """Show whose turn begins."""
        self._whose = whose
        self._tell()

    def end(self) -> None:
        """Show that this turn is over."""
        self._done += 1
        self._tell()

    def _tell(self) -> None:
        if self._shown:
            self._show(self._done, self._whose)
