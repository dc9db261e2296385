"""What a person sees while a run trains: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from samestep.ledger import StepRecord
from samestep.runtime.logs import RankLog

_SECONDS_BETWEEN_LINES = 10.0


class TrainingProgress:
    """Loss, throughput and time left; nothing at all on ranks other than 0."""

    def __init__(self, total: int | None, samples_per_step: int, log: RankLog, shown: bool) -> None:
        self._log = log
        self._total = total
        self._samples_per_step = samples_per_step
        self._shown = shown
        self._last_line = time.monotonic()
        self._bar: Progress | None = None
        if shown and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._row = self._bar.add_task("", total=total, text="")

    def __enter__(self) -> TrainingProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def record(self, record: StepRecord) -> None:
        """Show a step that has been read."""
        if not self._shown:
            return
        rate = self._samples_per_step / record.seconds if record.seconds else 0.0
        text = f"loss {record.loss:.4f}  {rate:,.0f} samples/s"
        if self._bar is not None:
            self._bar.update(self._row, completed=record.step + 1, text=text)
        elif time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            left = "" if self._total is None else f"/{self._total}"
            remaining = self._remaining(record)
            self._log.main(f"step {record.step + 1}{left}  {text}{remaining}")

    def _remaining(self, record: StepRecord) -> str:
        if self._total is None:
            return ""
        return f"  {(self._total - record.step - 1) * record.seconds:.0f} s left"
