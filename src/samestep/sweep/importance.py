"""How much each key of a sweep's space matters, by Optuna's estimate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from samestep.sweep.optuna_parts import import_optuna
from samestep.sweep.schema import SweepConfig
from samestep.sweep.storage import TrialRecord

FEWEST = 4
"""Complete trials below which an estimate says nothing."""


def importances(
    sweep: SweepConfig, trials: Sequence[TrialRecord]
) -> tuple[dict[str, float], str | None]:
    """The importance of each key, the greatest first, and why there is none, if there is none.

    Args:
        sweep: The sweep.
        trials: Its trials.
    """
    done = [
        trial
        for trial in trials
        # One that another program put into the storage may be of another space.
        if trial.state == "complete" and sweep.domains.keys() <= trial.frozen.params.keys()
    ]
    if len(done) < FEWEST:
        return {}, f"importance needs {FEWEST} complete trials, and there are {len(done)}"
    if len({trial.value for trial in done}) == 1:
        return {}, "importance needs trials that differ, and all came to the same value"
    optuna = import_optuna()
    study = optuna.create_study(direction=sweep.directions[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Of Optuna's estimates the one that needs no other package, and draws nothing at random.
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        study.add_trials(
            optuna.trial.create_trial(
                params=trial.frozen.params,
                distributions=trial.frozen.distributions,
                value=trial.value,
            )
            for trial in done
        )
        try:
            found = optuna.importance.get_param_importances(study, evaluator=evaluator)
        except (ImportError, ValueError, RuntimeError) as error:
            return {}, f"Optuna cannot estimate the importance: {error}"
    if not all(math.isfinite(value) for value in found.values()):
        return {}, "Optuna cannot estimate the importance of trials that differ so little"
    return dict(found), None
