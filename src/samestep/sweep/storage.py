"""A sweep's trials: Optuna's own storage, which its dashboard and library open too.

One process writes, which holds the sweep's lock; any number may read.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.checkpoint.run_result import RunResult, read_result
from samestep.errors import StorageError, TextError
from samestep.parsing.files import is_file
from samestep.parsing.json_text import read_json
from samestep.sweep.database import FILES, Database, name_of, open_database
from samestep.sweep.optuna_parts import distributions, import_optuna
from samestep.sweep.schema import SweepConfig
from samestep.sweep.space import encoded
from samestep.sweep.study_folder import trial_folder, write_document

_PLACE = "storage.json"
"""Which storage keeps the trials, and what tells their study from others of the same name there."""
_OWNER = "samestep_sweep"
VALUES, CURVES, FOLDS, PRUNED, REASON = "values", "curves", "folds", "pruned", "reason"
"""What we keep of a trial besides Optuna's: the values themselves, its evaluations by fold, the folds'
values, why it was pruned, and why it failed."""
_STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}


@dataclass(frozen=True)
class TrialRecord:
    """A trial as the storage has it."""

    number: int
    state: str
    """complete, pruned, failed or running."""
    value: float | None
    """By the first objective."""
    kept: Mapping[str, Any]
    frozen: Any
    """Optuna's own record."""

    @property
    def values(self) -> dict[str, Any]:
        """Return what it has drawn, by key."""
        return dict(self.kept.get(VALUES, {}))

    @property
    def objectives(self) -> tuple[float, ...]:
        """Return its values, one for each objective; empty if it is not complete."""
        return tuple(self.frozen.values or ()) if self.state == "complete" else ()

    @property
    def results(self) -> tuple[float, ...]:
        """Return its values, of one that is not complete at most that by the first objective."""
        return self.objectives or (() if self.value is None else (self.value,))

    @property
    def reason(self) -> str | None:
        """Return why it failed or was pruned."""
        return self.kept.get(REASON) or self.kept.get(PRUNED)

    @property
    def remark(self) -> str:
        """Return why it ended, in one line; else the values of its folds."""
        reason = (self.reason or "").partition("\n")[0]
        return reason or " ".join(f"{value:.4g}" for value in self.kept.get(FOLDS, []))

    @property
    def is_over(self) -> bool:
        return self.state != "running"

    def as_json(self) -> dict[str, Any]:
        """Return the fields of `show SWEEP --json`."""
        several = {"values": self.objectives} if len(self.objectives) > 1 else {}
        return {
            "number": self.number, "state": self.state, "value": self.value, **several,
            "params": self.values, "folds": self.kept.get(FOLDS, []), "reason": self.reason,
        }  # fmt: skip


def trial_cells(sweep: SweepConfig, results: Sequence[float], values: Mapping[str, Any]) -> list[str]:
    """Return a trial's result for each objective and the value of each key, as cells of a table."""
    missing = [None] * (len(sweep.metrics) - len(results))
    found = [*results, *missing, *(values.get(key) for key in sweep.domains)]
    return ["" if one is None else f"{one:.6g}" if isinstance(one, float) else str(one) for one in found]


class Storage:
    """The trials of one sweep.

    Args:
        write: Whether this process holds the sweep's lock; else nothing is made that is not there.

    Raises:
        StorageError: if it cannot be opened, or its study is another sweep's.
    """

    def __init__(self, sweep: SweepConfig, folder: Path, database: Database | None = None, write: bool = True) -> None:
        self._optuna, self._sweep = import_optuna(), sweep
        if database is None:
            database = open_database(sweep.storage, folder, write=write)
        self._database, self._storage = database, database.storage
        try:
            self._study = self._opened(folder) if write else self._loaded()
            if self._study is not None:
                self._id = self._storage.get_study_id_from_name(sweep.name)
        except StorageError:
            raise
        except Exception as error:
            raise database.error("has no study that can be used", error) from None

    def _loaded(self) -> Any:
        try:
            return self._optuna.load_study(storage=self._storage, study_name=self._sweep.name)
        except KeyError:  # its process has not come so far
            return None

    def _opened(self, folder: Path) -> Any:
        number = _study_number(self._sweep, folder, self._database)
        study = self._optuna.create_study(
            storage=self._storage, study_name=self._sweep.name, directions=self._sweep.directions, load_if_exists=True
        )
        if not self._database.is_shared:
            return study
        known = study.user_attrs.get(_OWNER)
        if known is None and not study.get_trials(deepcopy=False):
            study.set_user_attr(_OWNER, number)
        elif known != number:
            raise StorageError(
                f"{self._database.name} has a study {self._sweep.name} already, of another sweep: set another "
                "name, or another storage"
            )
        return study

    @staticmethod
    def exists(folder: Path) -> bool:
        return _kept_in(folder) is not None

    def close(self) -> None:
        """Let go of the file, or the connection."""
        self._database.close()

    def trials(self) -> list[TrialRecord]:
        """Return all that have begun, by number."""
        found: list[TrialRecord] = []
        if self._study is None:
            return found
        for trial in self._study.get_trials(deepcopy=False):
            state = _STATES.get(trial.state.name, "running")  # one that waits is about to run
            values = trial.values if state in ("complete", "pruned") else None
            value = values[0] if values else None
            found.append(TrialRecord(trial.number, state, value, dict(trial.user_attrs), trial))
        return found

    def begin(self, values: Mapping[str, Any], notes: Mapping[str, Any]) -> int:
        """Begin a trial with these values; return its number.

        Its values are kept with the first write already: a kill leaves it whole, or not at all.
        """
        domains = self._sweep.domains
        params = {key: encoded(domains[key], value) for key, value in values.items()}
        self._study.enqueue_trial(params, user_attrs={VALUES: dict(values)})
        number = int(self._study.ask(distributions(domains)).number)
        self.note(number, notes)
        return number

    def start_waiting(self) -> None:
        """Let the trial run that a killed process had written and not begun."""
        waiting = self._optuna.trial.TrialState.WAITING
        for _ in self._study.get_trials(deepcopy=False, states=(waiting,)):
            self._study.ask(distributions(self._sweep.domains))

    def keep(self, number: int, name: str, value: Any) -> None:
        """Keep something of a trial."""
        self._storage.set_trial_user_attr(self._trial_id(number), name, value)

    def note(self, number: int, notes: Mapping[str, Any]) -> None:
        """Keep what Optuna's sampler or pruner notes about a trial."""
        for name, note in notes.items():
            self._storage.set_trial_system_attr(self._trial_id(number), name, note)

    def report(self, number: int, step: int, value: float) -> None:
        """An intermediate value."""
        self._storage.set_trial_intermediate_value(self._trial_id(number), step, value)

    def complete(self, number: int, *values: float) -> None:
        """The trial has come to these values, one for each objective."""
        self._study.tell(number, values)

    def prune(self, number: int) -> None:
        """The trial was pruned; its last intermediate value is its value."""
        self._study.tell(number, state=self._optuna.trial.TrialState.PRUNED)

    def fail(self, number: int, reason: str) -> None:
        """The trial has failed."""
        self.keep(number, REASON, reason)
        self._study.tell(number, state=self._optuna.trial.TrialState.FAIL)

    def _trial_id(self, number: int) -> int:
        return int(self._storage.get_trial_id_from_study_id_trial_number(self._id, number))


def refuse_other_storage(sweep: SweepConfig, folder: Path) -> None:
    """Raise if a sweep that has begun keeps its trials elsewhere than its file says.

    Raises:
        StorageError: naming both places.
    """
    kept, wanted = _kept_in(folder), name_of(sweep.storage, folder)
    if kept is not None and kept != wanted:
        raise StorageError(
            f"the trials of {folder} are in {kept}, and storage is now {wanted}: set the one that it had, or "
            "another name for a new sweep"
        )


def _kept_in(folder: Path) -> str | None:
    """Return what keeps a sweep's trials, if it has begun."""
    if not is_file(folder / _PLACE):
        return None
    found = _read_place(folder).get("storage")
    return name_of(found, folder) if found in FILES else str(found)


def _read_place(folder: Path) -> dict[str, Any]:
    path = folder / _PLACE
    try:
        found = read_json(path)
    except TextError as error:
        raise StorageError(f"{path} {error}: where the trials are cannot be read") from None
    if not isinstance(found, dict):
        raise StorageError(f"{path} is not what a sweep writes: where the trials are cannot be read")
    return found


def _study_number(sweep: SweepConfig, folder: Path, database: Database) -> str:
    """Return what tells a sweep's study from others of its name, kept with where it is."""
    if is_file(folder / _PLACE):
        return str(_read_place(folder).get("study"))
    number = secrets.token_hex(8)
    # A file of the directory by its name: the directory may be moved.
    place = sweep.storage if sweep.storage in FILES else database.name
    write_document(folder / _PLACE, {"storage": place, "study": number})
    return number


def best_of(sweep: SweepConfig, trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the best of those that are complete by the first objective, the first of several; None if there is none."""
    sign = sweep.signs[0]
    done = [(sign * t.value, t.number, t) for t in trials if t.state == "complete" and t.value is not None]
    return min(done, key=lambda entry: entry[:2])[2] if done else None


_MOST_NAMED = 10


def front(sweep: SweepConfig, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the complete trials that no other is at least as good as in all objectives and better in one.

    With one objective: the best, and those that are equal to it.
    """
    costs = {
        trial.number: tuple(s * v for s, v in zip(sweep.signs, trial.objectives, strict=True))
        for trial in trials
        if len(trial.objectives) == len(sweep.signs)
    }
    numbers = unbeaten(costs)
    return [trial for trial in trials if trial.number in numbers]


def unbeaten(costs: Mapping[int, tuple[float, ...]]) -> list[int]:
    """Return whose costs no other's are at most as high as, and lower in one."""

    def is_beaten(own: tuple[float, ...]) -> bool:
        return any(other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in costs.values())

    return [number for number, own in costs.items() if not is_beaten(own)]


def best_words(sweep: SweepConfig, trials: Sequence[TrialRecord]) -> str:
    """Return the best trial so far, or the front; empty if none is complete."""
    if sweep.further_objectives:
        numbers = [str(trial.number) for trial in front(sweep, trials)]
        more = ", ..." if len(numbers) > _MOST_NAMED else ""
        return f"Pareto front: {', '.join(numbers[:_MOST_NAMED])}{more}" if numbers else ""
    best = best_of(sweep, trials)
    known = best is not None and best.value is not None
    return f"best: {best.value:.6g} (trial {best.number})" if best and known else ""


def results_of(sweep: SweepConfig, folder: Path, number: int) -> list[RunResult]:
    """Return the results of a trial's runs, which are all done."""
    home = trial_folder(folder, number)
    folds = [home] if sweep.folds is None else [home / f"fold-{n}" for n in range(sweep.folds.k)]
    found = [read_result(run) for run in folds]
    return [result for result in found if result is not None]
