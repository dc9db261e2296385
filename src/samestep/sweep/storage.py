"""A sweep's trials on the disk: Optuna's own storage, which its dashboard and library open too.

One process writes, which holds the sweep's lock; any number may read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import RunDirError
from samestep.foreign.files import is_file
from samestep.sweep.optuna_parts import distributions, import_optuna
from samestep.sweep.schema import SweepConfig
from samestep.sweep.space import encoded

FILE = "study.db"
VALUES, CURVES, FOLDS, PRUNED, REASON = "values", "curves", "folds", "pruned", "reason"
"""What we keep of a trial besides Optuna's: the values themselves, its evaluations by fold, the folds'
values, where it was pruned, and why it failed."""
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
        """What it has drawn, by key."""
        return dict(self.kept.get(VALUES, {}))

    @property
    def objectives(self) -> tuple[float, ...]:
        """What it came to, by each objective; empty if it is not complete."""
        return tuple(self.frozen.values or ()) if self.state == "complete" else ()

    @property
    def is_over(self) -> bool:
        return self.state != "running"

    def as_json(self) -> dict[str, Any]:
        """For `status --json`."""
        several = {"values": self.objectives} if len(self.objectives) > 1 else {}
        return {
            "number": self.number, "state": self.state, "value": self.value, **several,
            "params": self.values, "folds": self.kept.get(FOLDS, []), "reason": self.kept.get(REASON),
        }  # fmt: skip


class Storage:
    """The trials of one sweep.

    Args:
        sweep: The sweep.
        folder: Its directory.
    """

    def __init__(self, sweep: SweepConfig, folder: Path) -> None:
        optuna = import_optuna()
        self._optuna, self._sweep = optuna, sweep
        path = folder.resolve() / FILE
        try:
            # A reader may hold the file for a moment.
            self._storage = optuna.storages.RDBStorage(
                f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 60}}
            )
            self._study = optuna.create_study(
                storage=self._storage,
                study_name=sweep.name,
                directions=sweep.directions,
                load_if_exists=True,
            )
        except Exception as error:  # SQLAlchemy's and Optuna's have no root in common
            raise RunDirError(f"{path} cannot be opened as a study: {error}") from error
        self._id = self._storage.get_study_id_from_name(sweep.name)

    @staticmethod
    def exists(folder: Path) -> bool:
        return is_file(folder / FILE)

    def close(self) -> None:
        """Let go of the file."""
        self._storage.engine.dispose()

    def trials(self) -> list[TrialRecord]:
        """All that have begun, by number."""
        found = []
        for trial in self._study.get_trials(deepcopy=False):
            state = _STATES.get(trial.state.name, "running")  # one that waits is about to run
            values = trial.values if state in ("complete", "pruned") else None
            value = values[0] if values else None
            found.append(TrialRecord(trial.number, state, value, dict(trial.user_attrs), trial))
        return found

    def begin(self, values: Mapping[str, Any], notes: Mapping[str, Any]) -> int:
        """A new trial with these values; returns its number.

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


def best_of(sweep: SweepConfig, trials: list[TrialRecord]) -> TrialRecord | None:
    """The best of those that are complete by the first objective, the first of several; None if there is none."""
    sign = sweep.signs[0]
    done = [
        (sign * t.value, t.number, t)
        for t in trials
        if t.state == "complete" and t.value is not None
    ]
    return min(done, key=lambda entry: entry[:2])[2] if done else None
