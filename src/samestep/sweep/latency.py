"""Times the models of trials here and now, in another process."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samestep.errors import CheckpointError, TaskError, TextError
from samestep.parsing.json_text import read_json
from samestep.sweep.children import Children
from samestep.sweep.study_folder import write_document


@dataclass(frozen=True)
class Seconds:
    """A median, and the quarters of all rounds next to it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Seconds:
        low, median, high = statistics.quantiles(rounds, n=4, method="inclusive")
        return cls(median, low, high)

    def words(self) -> str:
        """In milliseconds."""
        return f"{self.median * 1e3:.3g} ms ({self.low * 1e3:.3g} to {self.high * 1e3:.3g})"


@dataclass(frozen=True)
class Latency:
    """The time of a trial's model for one sample, and for a batch."""

    one: Seconds
    batch: Seconds
    size: int
    """Samples of the batch."""

    def as_json(self) -> dict[str, Any]:
        return {"one_sample": asdict(self.one), "batch": asdict(self.batch), "batch_size": self.size}


def measure_latencies(runs: Mapping[int, Path], batch: int) -> dict[int, Latency]:
    """Return the latencies of trials' models, by number.

    Raises:
        TaskError: with the reason, if they cannot be measured.
    """
    _refuse_without_weights(runs)
    with tempfile.TemporaryDirectory() as place, Children() as children:
        result, output = Path(place) / "latency.json", Path(place) / "output.txt"
        words = ["latency", *map(str, runs.values()), "--batch", str(batch)]
        child = children.start("the measurement of latencies", [*words, "--result", str(result)], output)
        children.wait(child)
        children.refuse_stopped()
        if child.code != 0:
            raise TaskError(child.ending())
        try:
            told = read_json(result)
            return {
                number: Latency(Seconds.of(entry["one"]), Seconds.of(entry["batch"]), entry["size"])
                for number, entry in zip(runs, told, strict=True)
            }
        except (TextError, TypeError, KeyError, ValueError) as error:
            raise TaskError(f"its result cannot be read: {error}") from None


def _refuse_without_weights(runs: Mapping[int, Path]) -> None:
    """Before a process is started that would find out."""
    from samestep.checkpoint.listing import select_checkpoint

    for number, run in runs.items():
        try:
            select_checkpoint(run, "best")
        except CheckpointError as error:
            raise TaskError(f"trial {number}: {error}") from None


def write_latencies(timed: Sequence[Any], path: Path) -> None:
    """Leave what was measured for the process that asked."""
    write_document(path, [asdict(entry) for entry in timed])
