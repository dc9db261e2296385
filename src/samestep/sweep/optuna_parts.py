"""Optuna's samplers and pruners by name, and a sweep's past as a study of its own.

What a trial gets, and whether it is pruned, is a function of the sweep's seed, the trial's number and
the results of a stated set of other trials. So it is drawn from a study in memory that holds just
these: a resumed sweep draws what the killed one would have drawn.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from samestep.config.names import argument_mistakes, arguments_of
from samestep.errors import MissingExtraError, Mistake
from samestep.sweep.schema import SweepConfig, is_module_class
from samestep.sweep.space import Domain, decoded, encoded

if TYPE_CHECKING:
    import optuna

SAMPLERS = {
    "tpe": "TPESampler", "random": "RandomSampler", "grid": "GridSampler", "cmaes": "CmaEsSampler",
    "nsga2": "NSGAIISampler",
}  # fmt: skip
PRUNERS = {
    "none": "NopPruner", "median": "MedianPruner", "percentile": "PercentilePruner", "hyperband": "HyperbandPruner",
    "patient": "PatientPruner",
}  # fmt: skip
_WITH_A_PLACE = (":QMCSampler", ":GridSampler", ":BruteForceSampler")
_OURS = {"seed", "wrapped_pruner"}
"""Arguments that a sweep gives itself."""

Known = Mapping[int, "optuna.trial.FrozenTrial"]
"""Finished trials by number."""


def import_optuna() -> Any:
    """Optuna, quiet; raises what installs it if it is missing."""
    try:
        import optuna
    except ImportError:
        raise MissingExtraError("samestep sweep", "sweeps") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def part_mistakes(sweep: SweepConfig) -> list[Mistake]:
    """Return what is wrong with the sampler's and the pruner's names and arguments."""
    mistakes: list[Mistake] = []
    for key, known in (("sampler", SAMPLERS), ("pruner", PRUNERS)):
        name, given = getattr(sweep, key), getattr(sweep, f"{key}_args")
        if name not in known and not is_module_class(name):
            choices = ", ".join(known)
            mistakes.append(Mistake(key, f"you set {name!r}, but it takes {choices}, or module:Class"))
            continue
        if name == "grid":
            mistakes += [Mistake(f"sampler_args.{a}", "a grid takes no arguments") for a in given]
            mistakes += _grid_mistakes(sweep.domains)
            continue
        if name.endswith(_WITH_A_PLACE):
            why = "keeps its place in Optuna's study, and would draw the same again after a resume"
            mistakes.append(Mistake(key, f"{name} {why}: use tpe, random or grid"))
            continue
        try:
            takes = arguments_of(_class(key, name), _OURS)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            mistakes.append(Mistake(key, f"{name} cannot be used: {error}"))
            continue
        mistakes += argument_mistakes(f"{key}_args", name, takes, given)
    if sweep.pruner == "hyperband" and sweep.folds is not None:
        mistakes.append(Mistake("pruner", "hyperband counts evaluations, which folds repeat: use median"))
    return mistakes + _objective_mistakes(sweep)


def _objective_mistakes(sweep: SweepConfig) -> list[Mistake]:
    """Return what several objectives do not go with."""
    mistakes = []
    if sweep.sampler == "cmaes" and importlib.util.find_spec("cmaes") is None:
        raise MissingExtraError("sampler: cmaes", "sweeps")
    if len(set(sweep.metrics)) < len(sweep.metrics):
        message = f"a metric is named twice: {', '.join(sweep.metrics)}"
        mistakes.append(Mistake("objective", message))
    if not sweep.further_objectives:
        return mistakes
    if sweep.pruner != "none":
        message = f"you set {sweep.pruner!r}, and a pruner knows one objective only: set none"
        mistakes.append(Mistake("pruner", message))
    if sweep.sampler == "cmaes":
        message = "cmaes knows one objective only: use nsga2, tpe, random or grid"
        mistakes.append(Mistake("sampler", message))
    return mistakes


def _grid_mistakes(space: Mapping[str, Domain]) -> list[Mistake]:
    return [
        Mistake(f"space.{key}", "a grid needs single values: give a choice, int, or a step")
        for key, domain in space.items()
        if domain.grid() is None
    ]


def _class(key: str, name: str) -> Any:
    optuna = import_optuna()
    if is_module_class(name):
        module, _, attribute = name.partition(":")
        return getattr(importlib.import_module(module), attribute)
    home = optuna.samplers if key == "sampler" else optuna.pruners
    return getattr(home, {**SAMPLERS, **PRUNERS}[name])


def seed_of(sweep: SweepConfig, number: int) -> int:
    """Return a seed for each trial: a sampler that continues after a resume would repeat its first draws."""
    digest = hashlib.sha256(f"{sweep.seed}:{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def distributions(space: Mapping[str, Domain]) -> dict[str, Any]:
    """Return a space as Optuna has it."""
    optuna = import_optuna()
    found: dict[str, Any] = {}
    for key, domain in space.items():
        if domain.kind == "choice":
            choices = [encoded(domain, choice) for choice in domain.choices]
            found[key] = optuna.distributions.CategoricalDistribution(choices)
        elif domain.is_whole:
            step = int(domain.step or 1)
            found[key] = optuna.distributions.IntDistribution(int(domain.low), int(domain.high), domain.is_log, step)
        else:
            found[key] = optuna.distributions.FloatDistribution(domain.low, domain.high, domain.is_log, domain.step)
    return found


def trial_count(sweep: SweepConfig) -> int:
    """Return how many trials there are: a grid has no more than its points."""
    if sweep.sampler != "grid":
        return sweep.trials
    sizes = [len(domain.grid() or ()) for domain in sweep.domains.values()]
    return min(sweep.trials, math.prod(sizes))


def draw(sweep: SweepConfig, number: int, known: Known) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of a trial, by key, and what the sampler notes about it."""
    space = sweep.domains
    if sweep.sampler == "grid":
        points = itertools.product(*(domain.grid() or () for domain in space.values()))
        point = next(itertools.islice(points, number, None))
        return dict(zip(space, point, strict=True)), {}
    sampler = _make("sampler", sweep.sampler, {**sweep.sampler_args, "seed": seed_of(sweep, number)})
    study = _study(sweep, number, known, sampler=sampler)
    params = study.ask(distributions(space)).params
    notes = study.get_trials(deepcopy=False)[-1].system_attrs
    return {key: decoded(space[key], params[key]) for key in space}, dict(notes)


def decide(
    sweep: SweepConfig, number: int, values: Mapping[str, Any], reported: Sequence[tuple[int, float]], known: Known
) -> tuple[bool, dict[str, Any]]:
    """Return whether a trial is pruned after its last report, and what the pruner notes about it."""
    pruner = _make("pruner", sweep.pruner, dict(sweep.pruner_args))
    study = _study(sweep, number, known, pruner=pruner)
    study.enqueue_trial({key: encoded(sweep.domains[key], v) for key, v in values.items()})
    trial = study.ask(distributions(sweep.domains))
    prune = False
    for step, value in reported:
        trial.report(value, step)
        prune = trial.should_prune()
    notes = study.get_trials(deepcopy=False)[-1].system_attrs
    return prune, {name: note for name, note in notes.items() if name != "fixed_params"}


def _make(key: str, name: str, given: dict[str, Any]) -> Any:
    made = _class(key, name)
    takes = inspect.signature(made).parameters
    if "wrapped_pruner" in takes:
        given["wrapped_pruner"] = None
    with warnings.catch_warnings():
        # Of classes that a person has named, at every trial again.
        warnings.simplefilter("ignore", import_optuna().exceptions.ExperimentalWarning)
        return made(**{n: v for n, v in given.items() if n in takes or n not in _OURS})


def _study(sweep: SweepConfig, number: int, known: Known, **parts: Any) -> Any:
    """Return a study in memory, whose next trial has this number and sees the known ones only."""
    optuna = import_optuna()
    study = optuna.create_study(directions=sweep.directions, study_name=sweep.name, **parts)
    failed = optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL)
    study.add_trials(_shared(known.get(at, failed)) for at in range(number))
    return study


def _shared(trial: Any) -> Any:
    """Return a finished trial that a study in memory takes as it is: to copy thousands takes most of a decision's time."""
    found = copy.copy(trial)
    found.__dict__["__deepcopy__"] = lambda memo: copy.copy(trial)
    return found
