"""TensorBoard's events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samestep.errors import MissingExtraError
from samestep.tracking.contract import TrackedRun, Tracker, figures_in, flat_values


class TensorBoard(Tracker):
    """Scalars and figures as TensorBoard events."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise MissingExtraError("trackers.tensorboard", "tensorboard") from None
        self._make, self._folder = SummaryWriter, folder
        self._writer: Any = None

    def start(self, run: TrackedRun) -> None:
        # Readers then drop what an interrupted run wrote after its checkpoint.
        self._writer = self._make(str(self._folder), purge_step=run.start or None)

    def write(self, row: dict[str, Any]) -> None:
        for name, value in flat_values(row).items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, row["step"])
        for name, figure in figures_in(row).items():
            self._writer.add_figure(name, figure, row["step"], close=False)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
