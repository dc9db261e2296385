"""A study as a sweep leaves it, without its runs: trials of every state, some with folds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.sweep.loading import LoadedSweep, load_sweep
from samestep.sweep.optuna_parts import draw
from samestep.sweep.storage import CURVES, FOLDS, Storage
from samestep.sweep.study_folder import SWEEP, signed, write_document

BAD = "<script>alert(1)</script>"
SPACE = {
    "params.lr": {"loguniform": [0.001, 0.1]},
    "params.kind": {"choice": [BAD, "plain"]},
    "params.depth": {"int": [1, 3]},
}


def begin_study(folder: Path, **values: Any) -> LoadedSweep:
    """A sweep's directory as its process has written it before the first trial."""
    (folder / "base.yaml").write_text("task: task.py:Mine\nglobal_batch: 64\nepochs: 2\n")
    given: dict[str, Any] = {
        "base": "base.yaml", "name": "mine", "directory": str(folder / "study"), "space": SPACE,
        "objective": {"metric": "f1", "mode": "max"}, "sampler": "random", **values,
    }  # fmt: skip
    loaded = load_sweep(given, folder=folder)
    sweep = loaded.sweep
    sweep.path.mkdir()
    document = {**sweep.model_dump(mode="json"), "base": str(sweep.base_path.resolve())}
    write_document(sweep.path / SWEEP, signed(document))
    return loaded


def finish_study(loaded: LoadedSweep, trials: int = 10) -> None:
    """Trials that are complete, but for: 3, pruned; 5, failed; the last one, running."""
    sweep = loaded.sweep
    storage = Storage(sweep, sweep.path)
    for number in range(trials):
        values, notes = draw(sweep, number, {})
        storage.begin(values, notes)
        value = quality(values)
        count = 1 if sweep.folds is None else sweep.folds.k
        folds = [value + 0.01 * fold for fold in range(count)]
        storage.keep(number, CURVES, [[(4, fold / 2), (9, fold)] for fold in folds])
        if number == 3:
            storage.report(number, 1, value / 2)
            storage.prune(number)
        elif number == 5:
            storage.fail(number, f"RuntimeError: {BAD}")
        elif number < trials - 1:
            if sweep.folds is not None:
                storage.keep(number, FOLDS, folds)
            storage.complete(number, math.fsum(folds) / count)
    storage.close()


def quality(values: Mapping[str, Any]) -> float:
    """What a trial comes to, by its values."""
    return 1.0 - (math.log10(values["params.lr"]) + 2) ** 2 / 2 - values["params.depth"] / 50


def data_of(page: str) -> Any:
    """What a page's chart draws."""
    return json.loads(page.partition('<script type="application/json">')[2].partition("</script>")[0])
