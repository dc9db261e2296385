"""Selects a trial: the best one, or the fastest of those that are nearly as good.

Models are timed here and now, in another process.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from samestep.errors import CheckpointError, RunDirError, TaskError, TextError, UserError
from samestep.parsing.files import is_file
from samestep.parsing.json_text import read_json
from samestep.sweep.children import Children
from samestep.sweep.loading import LoadedSweep
from samestep.sweep.reading import best_trial, trials_of
from samestep.sweep.schema import SweepConfig
from samestep.sweep.storage import TrialRecord
from samestep.sweep.study_folder import trial_folder

MODEL = "model.safetensors"
LATENCY = "seconds for one sample"


@dataclass(frozen=True)
class Choice:
    """A trial, and what it was preferred to."""

    trial: TrialRecord
    best: TrialRecord
    margin: float
    measure: str
    """What its cost is: seconds for one sample, seconds per sample in training, or parameters."""
    cost: float
    best_cost: float
    candidates: Sequence[TrialRecord] = ()
    """All within the margin."""
    latencies: Mapping[int, Latency] = field(default_factory=dict)
    """Latencies of the candidates by number, if they were measured."""
    not_measured: str = ""
    """Why they were not."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields of `best --json`."""
        best = {"number": self.best.number, "value": self.best.value, "cost": self.best_cost}
        found = {"margin": self.margin, "measure": self.measure, "cost": self.cost, "best": best}
        if self.not_measured:
            return {**found, "not_measured": self.not_measured}
        candidates = [
            {"number": t.number, "value": t.value, **self.latencies[t.number].as_json()} for t in self.candidates
        ]
        return {**found, "candidates": candidates}

    def words(self, metric: str) -> str:
        """Return why this trial, in one sentence."""
        within = f"within {self.margin:g} of the best, {metric} {self.best.value:.6g} (trial {self.best.number})"
        if self.trial.number == self.best.number:
            return f"no trial {within}, has fewer {self.measure}: {self.cost:.4g}"
        costs = f"{self.cost:.4g} {self.measure}, where that has {self.best_cost:.4g}"
        return f"trial {self.trial.number} is {within}, and has the fewest: {costs}"

    def figures(self, metric: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return what was measured, as the header and the rows of a table; no rows if nothing was."""
        rows: list[tuple[str, ...]] = []
        for trial in self.candidates if self.latencies else ():
            taken = self.latencies[trial.number]
            batch = f"{taken.batch.words()} for {taken.size}"
            rows.append((str(trial.number), f"{trial.value:.6g}", taken.one.words(), batch))
        return ("trial", metric, "one sample", "a batch"), rows


def prefer_faster(loaded: LoadedSweep, margin: float) -> Choice:
    """Return the fastest trial whose value is within a margin of the best.

    By what its model takes for one sample, measured now; where that cannot be, by its training.

    Raises:
        RunDirError: if no trial is complete, or one within the margin has left no measurement.
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
    try:
        return _by_latency(loaded, near, best, margin)
    except UserError as error:
        reason = str(error)
    for measure, cost_of in _MEASURES.items():
        costs = {trial.number: cost_of(loaded.sweep, trial) for trial in near}
        known = {number: cost for number, cost in costs.items() if cost is not None}
        if len(known) < len(near):
            continue  # compared by one measure, or not at all
        chosen = _least(near, best, known)
        cost, best_cost = known[chosen.number], known[best.number]
        return Choice(chosen, best, margin, measure, cost, best_cost, near, not_measured=reason)
    without = ", ".join(str(number) for number, cost in costs.items() if cost is None)
    raise RunDirError(
        f"nothing shows how fast the trials {without} are: their latency could not be measured ({reason}), "
        f"and the directories of their runs have neither times in metrics.jsonl nor a {MODEL}. Leave out "
        "--prefer-faster-within"
    )


def _by_latency(loaded: LoadedSweep, near: Sequence[TrialRecord], best: TrialRecord, margin: float) -> Choice:
    base = loaded.base
    size = base.evaluation.batch or base.batch_plan(1).lane_batch
    # The folds of a trial have the same model.
    runs = {trial.number: runs_of(loaded.sweep, trial)[0] for trial in near}
    found = measure_latencies(runs, size)
    fastest = min((found[trial.number].one for trial in near), key=lambda one: one.median)
    # What the spread cannot tell from the fastest is as fast: of those, the better one.
    costs = {n: 0.0 if f.one.low <= fastest.high else f.one.median for n, f in found.items()}
    chosen = _least(near, best, costs)
    cost, best_cost = found[chosen.number].one.median, found[best.number].one.median
    return Choice(chosen, best, margin, LATENCY, cost, best_cost, near, found)


def _least(near: Sequence[TrialRecord], best: TrialRecord, costs: Mapping[int, float]) -> TrialRecord:
    """Return the least; of equal ones the better, and of those the first."""
    value = best.value or 0.0
    order = [(costs[t.number], abs((t.value or 0.0) - value), t.number, t) for t in near]
    return min(order, key=lambda entry: entry[:3])[3]


def seconds_per_sample(sweep: SweepConfig, trial: TrialRecord) -> float | None:
    """Return what a sample costs in training, the mean of a trial's folds; None if a run has not measured it.

    Not of a step: batches of trials may differ.
    """
    from samestep.run.time_report import read_times

    found = []
    for run in runs_of(sweep, trial):
        try:
            speed = read_times(run).get("samples_per_second", {}).get("median")
        except RunDirError:
            return None
        if not speed:
            return None
        found.append(1 / speed)
    return math.fsum(found) / len(found) if found else None


def parameters(sweep: SweepConfig, trial: TrialRecord) -> float | None:
    """Return how many numbers a trial's model has; None if it has left no model."""
    from safetensors import SafetensorError, safe_open

    path = runs_of(sweep, trial)[0] / MODEL
    if not is_file(path):
        return None
    try:
        with safe_open(path, framework="np") as file:
            return float(
                sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
            )
    except (SafetensorError, OSError):
        return None


_MEASURES: dict[str, Callable[[SweepConfig, TrialRecord], float | None]] = {
    "seconds per sample in training": seconds_per_sample,
    "parameters": parameters,
}


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
