"""Where measurements go: one contract, rank 0 only."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from samestep.config import Config
from samestep.errors import MissingExtraError, RunDirError


class Tracker(ABC):
    """Takes rows of values; every row has a `step`."""

    @abstractmethod
    def write(self, row: dict[str, Any]) -> None: ...

    @abstractmethod
    def flush(self) -> None:
        """Make what was written readable to others."""

    @abstractmethod
    def close(self) -> None: ...


class JsonLines(Tracker):
    """One JSON object a line; floats in full, so that they read back to the bit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # What a resumed run had written up to its checkpoint stays.
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise self._named(error) from error

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            raise self._named(error) from error

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise self._named(error) from error

    def _named(self, error: OSError) -> RunDirError:
        return RunDirError(
            f"{self._path} could not be written: {error.strerror or error}. Free space or fix "
            "the disk, and start the run again to resume from its newest checkpoint"
        )


class TensorBoard(Tracker):
    """Scalars as TensorBoard events."""

    def __init__(self, folder: Path, start: int) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise MissingExtraError("trackers.tensorboard", "tensorboard") from None
        # Readers then drop what an interrupted run wrote after its checkpoint.
        self._writer = SummaryWriter(str(folder), purge_step=start or None)

    def write(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, row["step"])

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Trackers(Tracker):
    """All trackers of a run; on ranks other than 0, none."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def write(self, row: dict[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.write(row)

    def flush(self) -> None:
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def open_trackers(config: Config, folder: Path, is_main: bool, start: int = 0) -> Trackers:
    """The config's trackers on rank 0, for steps from `start` on; none on the others."""
    if not is_main:
        return Trackers([])
    trackers: list[Tracker] = [JsonLines(folder / "metrics.jsonl")]
    if config.trackers.tensorboard:
        trackers.append(TensorBoard(folder / "tensorboard", start))
    return Trackers(trackers)
