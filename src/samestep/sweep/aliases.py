"""Other projects' names for a sweep's keys, so that their files carry over nearly as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from samestep.errors import Mistake

Given = Mapping[str, Any]
Ours = dict[str, Any]


def _sampling(given: Given) -> Ours:
    named = {"algorithm": "sampler", "max_trials": "trials", "seed": "seed"}
    found = {ours: given[name] for name, ours in named.items() if name in given}
    if found.get("sampler") in ("bayesian", "bayes"):
        found["sampler"] = "tpe"
    if "timeout_minutes" in given:
        found["timeout"] = f"{given['timeout_minutes']}m"
    return found


def _early_termination(given: Given) -> Ours:
    policy = given.get("policy")
    # A bandit compares with the best so far; Optuna's nearest is the median.
    found: Ours = {"pruner": "median" if policy == "bandit" else policy}
    named = {"delay_evaluation": "n_startup_trials", "evaluation_interval": "n_warmup_steps"}
    arguments = {ours: given[name] for name, ours in named.items() if name in given}
    return {**found, "pruner_args": arguments} if arguments else found


def _k_fold(given: Given) -> Ours:
    if given.get("enabled") is False:
        return {}
    named = {"n_splits": "k", "random_seed": "seed"}
    folds = {ours: given[name] for name, ours in named.items() if name in given}
    if "stratified" in given:
        folds["stratify"] = "by_label" if given["stratified"] is True else "none"
    return {"folds": folds}


_SECTIONS: dict[str, tuple[tuple[str, ...], Callable[[Given], Ours]]] = {
    "sampling": (("algorithm", "max_trials", "timeout_minutes", "seed"), _sampling),
    "early_termination": (
        ("policy", "delay_evaluation", "evaluation_interval"),
        _early_termination,
    ),
    "k_fold": (("n_splits", "random_seed", "shuffle", "stratified", "enabled"), _k_fold),
}
_MODES = {"maximize": "max", "minimize": "min"}


def apply_sweep_aliases(values: Given) -> tuple[Ours, list[Mistake], list[str]]:
    """The values under our names, what is wrong with them, and what a person should know of it."""
    ours = {key: value for key, value in values.items() if key not in (*_SECTIONS, "search_space")}
    mistakes: list[Mistake] = []
    notes: list[str] = []
    renamed: dict[str, Ours] = {}
    if "search_space" in values:
        renamed["search_space"] = {"space": values["search_space"]}
    for name, (takes, convert) in _SECTIONS.items():
        given = values.get(name)
        if isinstance(given, Mapping):
            unknown = [key for key in given if key not in takes]
            listed = ", ".join(takes)
            mistakes += [
                Mistake(f"{name}.{key}", f"is not a key of it: it takes {listed}")
                for key in unknown
            ]
            renamed[name] = convert(given)
        elif name in values:
            mistakes.append(Mistake(name, f"you set {given!r}, but it takes a mapping"))
    for name, found in renamed.items():
        for key, value in found.items():
            if key in ours:
                mistakes.append(Mistake(name, f"{key} is set too: keep one of them"))
            ours[key] = value
    _note(values, mistakes, notes)
    given = ours.get("objective")
    if isinstance(given, list) and given:
        if "further_objectives" in ours:
            mistakes.append(Mistake("objective", "further_objectives is set too: keep one of them"))
        ours["objective"] = given[0]
        ours["further_objectives"] = [_objective(more) for more in given[1:]]
    ours["objective"] = _objective(ours.get("objective"))
    if ours["objective"] is None:
        del ours["objective"]
    return ours, mistakes, notes


def _note(values: Given, mistakes: list[Mistake], notes: list[str]) -> None:
    policy, folds = values.get("early_termination"), values.get("k_fold")
    if isinstance(policy, Mapping) and policy.get("policy") == "bandit":
        notes.append("early_termination.policy is bandit, which the median pruner stands for")
    if isinstance(folds, Mapping) and folds.get("shuffle") is False:
        message = "folds are always shuffled: leave it out, or give folds.file"
        mistakes.append(Mistake("k_fold.shuffle", message))


def _objective(given: Any) -> Any:
    """`goal` or `direction: maximize` is `mode: max`."""
    if not isinstance(given, Mapping):
        return given
    rest = {key: value for key, value in given.items() if key not in ("goal", "direction")}
    for name in ("goal", "direction"):
        if name in given and "mode" not in rest:
            rest["mode"] = _MODES.get(str(given[name]), given[name])
    return rest
