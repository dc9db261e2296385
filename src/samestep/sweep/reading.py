"""Reads a sweep's directory: its trials, the best of them, and that one's config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from samestep.config.loading import nest
from samestep.config.secrets import without_passwords
from samestep.config.sources import FlatValues
from samestep.errors import NotTrusted, RunDirError, TextError
from samestep.parsing.json_text import read_json
from samestep.sweep.database import FILES
from samestep.sweep.loading import LoadedSweep, load_sweep
from samestep.sweep.run_spec import override
from samestep.sweep.storage import Storage, TrialRecord, best_of, refuse_other_storage
from samestep.sweep.study_folder import SWEEP, is_signed


def reload_sweep(folder: Path, trust: bool = False) -> LoadedSweep:
    """Return the sweep that a directory is of, to look at: nothing that it names is imported.

    Raises:
        NotTrusted: if this user has not started it, and it names a database.
    """
    document = _read(folder)
    storage = document.get("storage", "sqlite")
    if storage not in FILES and not trust and not is_signed(_whole(folder)):
        raise NotTrusted(
            f"{folder} keeps its trials in a database, {without_passwords(str(storage))}, to which this command "
            f"would connect with your user and your variables. It was not started by you, or its {SWEEP} was "
            "changed: look at that file first; then --trust connects"
        )
    return load_sweep({**document, "directory": str(folder)}, runs=False)


def resumed_sweep(folder: Path, overrides: list[str], trust: bool) -> LoadedSweep:
    """Return the sweep that a directory is of, to run.

    Raises:
        NotTrusted: if this user has not started it: it names code to run.
    """
    document = _read(folder, check=not trust)
    return load_sweep({**document, "directory": str(folder)}, overrides)


def _whole(folder: Path) -> dict[str, Any]:
    """Return the sweep's document with its signature."""
    try:
        document = read_json(folder / SWEEP)
    except TextError as error:
        raise RunDirError(f"{folder / SWEEP} {error}") from None
    if not isinstance(document, dict):
        raise RunDirError(f"{folder / SWEEP} is not what a sweep writes")
    return document


def _read(folder: Path, check: bool = False) -> dict[str, Any]:
    document = _whole(folder)
    if check and not is_signed(document):
        raise NotTrusted(
            f"{folder} names the config {document.get('base')}, whose task would run, and is not trusted: it "
            f"was not started by you, or its {SWEEP} was changed. Read both first; then --trust runs it"
        )
    return {key: value for key, value in document.items() if key != "signature"}


def trials_of(loaded: LoadedSweep) -> list[TrialRecord]:
    """Return all trials of a sweep, as they are now."""
    if not Storage.exists(loaded.sweep.path):
        return []
    refuse_other_storage(loaded.sweep, loaded.sweep.path)
    storage = Storage(loaded.sweep, loaded.sweep.path, write=False)
    try:
        return storage.trials()
    finally:
        storage.close()


def best_trial(loaded: LoadedSweep) -> TrialRecord:
    """Return the best trial so far; raises a `RunDirError` if none is complete."""
    best = best_of(loaded.sweep, trials_of(loaded))
    if best is None:
        raise RunDirError(f"no trial of {loaded.sweep.path} is complete yet")
    return best


def complete_trial(loaded: LoadedSweep, number: int) -> TrialRecord:
    """One trial by its number; raises a `RunDirError` if it is not complete."""
    found = {trial.number: trial for trial in trials_of(loaded)}.get(number)
    if found is None or found.state != "complete":
        state = "there is no such trial" if found is None else f"it is {found.state}"
        raise RunDirError(f"trial {number} of {loaded.sweep.path} is not complete: {state}")
    return found


def trial_config(loaded: LoadedSweep, trial: TrialRecord, why: str = "") -> str:
    """Return the base with a trial's values, as YAML: for the final training, on all of train_data."""
    sweep = loaded.sweep
    flat = FlatValues.from_file(sweep.base_path)
    name = f"{sweep.name[:90]}-best"
    given: dict[str, Any] = {
        **trial.values,
        "name": name,
        "best.metric": sweep.objective.metric,
        "best.mode": sweep.objective.mode,
        # Whole, since nobody knows where this will be saved.
        "task": str(loaded.base.folder.resolve() / str(loaded.base.task)),
    }
    flat.override([override(key, value) for key, value in given.items()])
    text = yaml.safe_dump(nest(flat.values), sort_keys=False, allow_unicode=True)
    pairs = zip(sweep.metrics, trial.objectives, strict=True)
    values = ", ".join(f"{metric} {value!r}" for metric, value in pairs)
    head = f"# Trial {trial.number} of the sweep {sweep.name}: {values}\n"
    reason = "".join(f"# {line}\n" for line in (why, *loaded.base.platform_notes) if line)
    return f"{head}{reason}{text}"
