"""Selects the fastest of the trials that are nearly as good as the best one.

Models are timed here and now, in another process.
"""

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
from samestep.sweep.loading import LoadedSweep
from samestep.sweep.reading import best_trial, trials_of
from samestep.sweep.schema import SweepConfig
from samestep.sweep.storage import TrialRecord
from samestep.sweep.study_folder import trial_folder


@dataclass(frozen=True)
class Choice:
    """A trial, and what it was preferred to."""

    trial: TrialRecord
    best: TrialRecord
    margin: float
    candidates: Sequence[TrialRecord]
    """All within the margin."""
    latencies: Mapping[int, Latency]
    """Latencies of the candidates by number."""

    def cost(self, trial: TrialRecord) -> float:
        """Return the seconds that a candidate takes for one sample."""
        return self.latencies[trial.number].one.median

    def as_json(self) -> dict[str, Any]:
        """Return the fields of `best --json`."""
        best = {"number": self.best.number, "value": self.best.value, "cost": self.cost(self.best)}
        candidates = [
            {"number": t.number, "value": t.value, **self.latencies[t.number].as_json()} for t in self.candidates
        ]
        return {"margin": self.margin, "cost": self.cost(self.trial), "best": best, "candidates": candidates}

    def words(self, metric: str) -> str:
        """Return why this trial, in one sentence."""
        within = f"within {self.margin:g} of the best, {metric} {self.best.value:.6g} (trial {self.best.number})"
        if self.trial.number == self.best.number:
            return (
                f"no trial {within}, is faster than its {self.latencies[self.best.number].one.words()} for one sample"
            )
        took, best = (self.latencies[trial.number].one.words() for trial in (self.trial, self.best))
        return (
            f"trial {self.trial.number} is {within}, and is the fastest: {took} for one sample, where that takes {best}"
        )

    def figures(self, metric: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return what was measured, as the header and the rows of a table."""
        rows: list[tuple[str, ...]] = []
        for trial in self.candidates:
            taken = self.latencies[trial.number]
            batch = f"{taken.batch.words()} for {taken.size}"
            rows.append((str(trial.number), f"{trial.value:.6g}", taken.one.words(), batch))
        return ("trial", metric, "one sample", "a batch"), rows


def prefer_faster(loaded: LoadedSweep, margin: float) -> Choice:
    """Return the trial whose model is the fastest for one sample, measured now, within a margin of the best value.

    Raises:
        RunDirError: No trial is complete.
        TaskError: A model within the margin cannot be measured.
    """
    best = best_trial(loaded)
    assert best.value is not None, "it is complete"
    # 0.985 is within 0.015 of 1, which floats deny.
    allowed = margin * abs(best.value) * (1 + 1e-9)
    near = [
        trial
        for trial in trials_of(loaded)
        if trial.state == "complete" and trial.value is not None and abs(trial.value - best.value) <= allowed
    ]
    base = loaded.base
    size = base.evaluation.batch or base.batch_plan(1).lane_batch
    # The folds of a trial have the same model.
    runs = {trial.number: runs_of(loaded.sweep, trial)[0] for trial in near}
    try:
        found = measure_latencies(runs, size)
    except TaskError as error:
        raise TaskError(f"--prefer-faster-within cannot measure the models: {error}. Leave out the option") from None
    fastest = min((found[trial.number].one for trial in near), key=lambda one: one.median)
    # What the spread cannot tell from the fastest is as fast: of those, the better one.
    costs = {n: 0.0 if f.one.low <= fastest.high else f.one.median for n, f in found.items()}
    return Choice(_least(near, best, costs), best, margin, near, found)


def _least(near: Sequence[TrialRecord], best: TrialRecord, costs: Mapping[int, float]) -> TrialRecord:
    """Return the least; of equal ones the better, and of those the first."""
    value = best.value or 0.0
    order = [(costs[t.number], abs((t.value or 0.0) - value), t.number, t) for t in near]
    return min(order, key=lambda entry: entry[:3])[3]


def runs_of(sweep: SweepConfig, trial: TrialRecord) -> Sequence[Path]:
    """Return the directories of a trial's runs, one for each fold."""
    home = trial_folder(sweep.path, trial.number)
    if sweep.folds is None:
        return [home]
    return [home / f"fold-{fold}" for fold in range(sweep.folds.k)]


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
        """Return it in milliseconds."""
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
            measured = read_json(result)
            return {
                number: Latency(Seconds.of(entry["one"]), Seconds.of(entry["batch"]), entry["size"])
                for number, entry in zip(runs, measured, strict=True)
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
